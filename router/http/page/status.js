// The status page: follows /status/events and draws what they say. All text goes in as text, never as markup.
"use strict";

const PAGES = ["free", "evictable", "reserved", "filling", "sealed", "retiring", "quarantined"];
const FIGURES = [
  ["completion_tokens", "tokens/s", (v) => number(v, 0)],
  ["ttft_p50", "TTFT p50", milliseconds],
  ["ttft_p99", "TTFT p99", milliseconds],
  ["itl_p50", "ITL p50", milliseconds],
  ["itl_p99", "ITL p99", milliseconds],
];
const RETRY_MS = 2000;
const SILENT_MS = 10000;
let key = "";

const at = (id) => document.getElementById(id);

function number(value, digits) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function milliseconds(seconds) {
  return `${number(seconds * 1000, seconds < 0.1 ? 1 : 0)} ms`;
}

function age(seconds) {
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function card(name, value) {
  const made = element("div", "card");
  made.dataset.name = name;
  made.append(element("div", "name", name), element("div", "value", value));
  return made;
}

function line(values) {
  const space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 59 20");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const top = Math.max(...values.filter((v) => v !== null), 1e-9), first = 60 - values.length;
  let points = [];
  const draw = () => {
    if (!points.length) return;
    const drawn = document.createElementNS(space, "polyline");
    drawn.setAttribute("points", points.length > 1 ? points.join(" ") : `${points[0]} ${points[0]}`);
    svg.append(drawn);
    points = [];
  };
  values.forEach((v, i) => (v === null ? draw() : points.push(`${first + i},${19 - (18 * v) / top}`)));
  draw();
  return svg;
}

function figure([field, name, shown], told) {
  const values = told.figures[field], last = values.findLast((v) => v !== null);
  const made = card(name, last === undefined ? "-" : shown(last));
  made.append(line(values));
  return made;
}

function bar(pages) {
  const made = element("div", "bar");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", PAGES.filter((s) => pages[s]).map((s) => `${pages[s]} ${s}`).join(", "));
  for (const state of PAGES.filter((s) => pages[s])) {
    const part = element("span", state);
    part.style.flexGrow = pages[state];
    part.title = `${pages[state]} ${state}`;
    made.append(part);
  }
  return made;
}

function worker(told) {
  const row = element("tr"), all = PAGES.reduce((sum, state) => sum + told.pages[state], 0);
  const used = all - told.pages.free - told.pages.evictable, pages = element("td");
  row.dataset.worker = told.name;
  pages.append(bar(told.pages));
  row.append(
    element("td", "", told.name),
    element("td", "", told.role),
    element("td", told.state === "ready" ? "state" : "state bad", told.state),
    element("td", "number", number(told.running, 0)),
    element("td", "number", `${number(told.waiting, 0)} (${number(told.waiting_tokens, 0)} tokens)`),
    pages,
    element("td", "number", all ? `${number((100 * used) / all, 0)} % of ${number(all, 0)}` : "-"),
    element("td", "number", `${number(told.heartbeat_age_s, 1)} s`),
  );
  return row;
}

function draw(told) {
  say(told.state, told.state !== "serving");
  at("router").textContent = told.router;
  at("uptime").textContent = age(told.uptime_s);
  const cached = told.cached_share === null ? "-" : `${number(100 * told.cached_share, 0)} %`;
  at("tiles").replaceChildren(
    card("running", number(told.running, 0)),
    card("queued", number(told.queued, 0)),
    card("requests/s", number(told.requests, 1)),
    card("failed/s", number(told.failures, 1)),
    card("prompt tokens/s", number(told.prompt_tokens, 0)),
    card("cached", cached),
    card("finished since start", number(told.totals.finished, 0)),
    card("failed since start", number(told.totals.failed, 0)),
  );
  at("figures").replaceChildren(...FIGURES.map((each) => figure(each, told)));
  at("problems").replaceChildren(...told.problems.map((text) => element("li", "problem", text)));
  at("workers").replaceChildren(...told.workers.map(worker));
  at("ask").hidden = true;
  at("page").hidden = false;
}

function say(text, bad) {
  at("state").textContent = text;
  at("state").classList.toggle("bad", bad);
  document.title = `pdserve: ${text}`;
}

// Draws every event of the stream; returns when it ends. One that is silent for long is given up.
async function read(body, stop) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", timer = 0;
  try {
    for (;;) {
      timer = setTimeout(() => stop.abort(), SILENT_MS);
      const { value, done } = await reader.read();
      clearTimeout(timer);
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) draw(JSON.parse(event.slice("data: ".length)));
    }
  } finally {
    clearTimeout(timer);
  }
}

async function follow() {
  const headers = key ? { authorization: `Bearer ${key}` } : {}, stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), SILENT_MS);
  const answer = await fetch("status/events", { headers, cache: "no-store", signal: stop.signal });
  clearTimeout(timer);
  if (answer.ok) {
    await read(answer.body, stop);
    throw new Error("the connection ended; trying again");
  }
  const told = await answer.json();
  if (answer.status === 401) await ask(key ? told.error.message : "This router wants an API key.");
  else throw new Error(told.error.message);
}

function ask(why) {
  say("waits for a key", true);
  at("why").textContent = why;
  at("page").hidden = true;
  at("ask").hidden = false;
  at("key").focus();
  return new Promise((done) => {
    at("ask").onsubmit = (event) => {
      event.preventDefault();
      const given = at("key").value.trim();
      at("key").value = "";
      if (/^[\x21-\x7e]+$/.test(given)) {
        key = given;
        done();
      } else {
        at("why").textContent = "A key has no blanks and only ASCII characters.";
      }
    };
  });
}

async function main() {
  for (const state of PAGES) at("legend").append(element("span", `swatch ${state}`), state);
  for (;;) {
    try {
      await follow();
    } catch (error) {
      say(error instanceof Error && error.name === "Error" ? error.message : "no answer; trying again", true);
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  }
}

main();
