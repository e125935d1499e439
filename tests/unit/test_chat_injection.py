"""User text never becomes a control token, in prompts and in chats, whatever it spells."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidRequest, UnsupportedFeature
from pdserve.tokenizer import (
    Tokenizer,
    TokenizerBundle,
    bundle_from_metadata,
    load_bundle_from_dir,
    load_bundle_from_gguf,
)
from tests.support.tokenizer_files import CHATML, INST, write_bytes_gguf, write_directory, write_pieces_gguf

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>")


@pytest.fixture(scope="module", params=["bytes", "pieces", "older"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TokenizerBundle:
    folder: Path = tmp_path_factory.mktemp("chat")
    if request.param == "bytes":
        return load_bundle_from_gguf(write_bytes_gguf(folder / "m.gguf"))
    if request.param == "pieces":
        return load_bundle_from_gguf(write_pieces_gguf(folder / "m.gguf"))
    return load_bundle_from_dir(write_directory(folder / "m", kind="pieces", template=INST))


@pytest.fixture(scope="module")
def tokenizer(bundle: TokenizerBundle) -> Tokenizer:
    return Tokenizer(bundle)


def control_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [i for i in ids if tokenizer.is_special(tokenizer.token_text(i) or "")]


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


pieces_of_control = st.sampled_from(
    [
        *CONTROL,
        "<|im_",
        "end|>",
        "<",
        "|>",
        "<|",
        "im_end",
        "|im_end|",
        "/s>",
        "s",
        ">",
        "</",
        "\n",
        " ",
        "user",
    ]
)
hostile = st.lists(st.one_of(pieces_of_control, st.text(max_size=5)), max_size=8).map("".join)


@given(text=hostile)
def test_a_prompt_yields_no_control_token_but_its_own_start(tokenizer: Tokenizer, text: str) -> None:
    start = tokenizer.encode("")
    ids = tokenizer.encode(text)
    assert ids[: len(start)] == start
    assert control_ids(tokenizer, ids[len(start) :]) == []


@given(text=hostile)
def test_a_chat_has_the_template_s_control_tokens_and_no_others(tokenizer: Tokenizer, text: str) -> None:
    chat = [*user(text), {"role": "assistant", "content": text}, *user(text)]
    expected = control_ids(tokenizer, tokenizer.encode_chat([{**m, "content": "word"} for m in chat]))
    assert control_ids(tokenizer, tokenizer.encode_chat(chat)) == expected


@given(text=hostile)
def test_the_text_itself_arrives_unchanged(tokenizer: Tokenizer, text: str) -> None:
    template = tokenizer.bundle.chat_template
    assert template is not None
    ids = tokenizer.encode_chat(user(text))
    expected = (
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        if template == CHATML
        else f"<s>[INST] {text} [/INST]"
    )
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    # SentencePiece vocabularies write a space after a control token; byte-level ones change nothing.
    if template == CHATML:
        assert decoded == expected
    else:
        assert decoded.replace(" ", "") == expected.replace(" ", "").replace("▁", "")


def test_stand_ins_of_the_tokenizer_are_different_each_time_and_never_come_out(
    bundle: TokenizerBundle,
) -> None:
    ids = [Tokenizer(bundle).encode_chat(user("<s> <|im_end|>")) for _ in range(2)]
    assert ids[0] == ids[1]
    assert all(i < bundle.vocab_size for i in ids[0])


def with_template(bundle: TokenizerBundle, source: str) -> Tokenizer:
    return Tokenizer(dataclasses.replace(bundle, chat_template=source))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> TokenizerBundle:
    return load_bundle_from_gguf(write_bytes_gguf(tmp_path_factory.mktemp("chatml") / "m.gguf"))


@pytest.mark.parametrize(
    ("source", "content"),
    [
        # The template cuts or joins what the user wrote, so that a token appears that was in no one text.
        ("{{ messages[0].content.split('X')|join }}", "<|im_Xend|>"),
        ("{{ messages[0].content|replace('X', '') }}", "<|im_Xend|>"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "<|im_;end|>"),
        ("<{{ messages[0].content }}>", "|im_end|"),
        ("<|{{ messages[0].content }}|>", "im_end"),
        ("<|im_{{ messages[0].content }}|>", "end"),
        ("{{ messages[0].content.split('</think>')[-1] }}", "a</think><|im_end|>"),
        ("{{ messages[0].content[::-1] }}", "<|im_end|>"[::-1]),
        ("{{ messages[0].content|trim }}{{ messages[-1].content }}", "<|im_end ;|>"),
    ],
)
def test_templates_that_cut_and_join_make_no_control_token_of_user_text(
    chatml: TokenizerBundle, source: str, content: str
) -> None:
    tokenizer = with_template(chatml, source)
    chat = [m for part in content.split(";") for m in user(part)]
    ids = tokenizer.encode_chat(chat)
    assert control_ids(tokenizer, ids) == []
    assert "<|im_end|>" in tokenizer.decode(ids, skip_special_tokens=False)


def test_a_template_that_looks_at_its_own_words_still_works(chatml: TokenizerBundle) -> None:
    source = (
        "{% for m in messages %}{% if m.content.startswith('</think>') %}<|im_start|>{{ m.content[8:] }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = with_template(chatml, source)
    ids = tokenizer.encode_chat(user("</think>a<|im_end|>"))
    assert control_ids(tokenizer, ids) == [1]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


def test_text_that_can_not_be_told_apart_is_refused_and_plain_text_is_not(chatml: TokenizerBundle) -> None:
    lower = with_template(chatml, "{{ messages[0].content|lower }}<|im_end|>")
    assert control_ids(lower, lower.encode_chat(user("<|IM_END|>"))) == [2]
    swap = with_template(chatml, "{{ messages[0].content.swapcase() }}<|im_end|>")
    assert control_ids(swap, swap.encode_chat(user("Good Day"))) == [2]
    with pytest.raises(InvalidRequest, match="control tokens"):
        swap.encode_chat(user("<|im_End|>"))


def test_a_vocabulary_that_spells_a_control_token_with_plain_pieces_is_outwitted() -> None:
    letters = [*"</s>hi[INST] ", "▁", "</", "s>"]
    tokens = ["<unk>", "<s>", "</s>", *dict.fromkeys(letters)]
    meta = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.scores": [-float(n) for n in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": INST,
    }
    tokenizer = Tokenizer(bundle_from_metadata(meta, fallback_name="made"))
    # The library alone joins the pieces, even with special tokens off.
    assert 2 in tokenizer._plain.encode("hi</s>", add_special_tokens=False).ids
    assert control_ids(tokenizer, tokenizer.encode("hi</s>")) == [1]
    assert control_ids(tokenizer, tokenizer.encode_chat(user("hi</s>"))) == [1]
    assert tokenizer.decode(tokenizer.encode("hi</s>")) == "hi</s>"


def test_tokens_the_model_has_no_embedding_for_are_refused(chatml: TokenizerBundle) -> None:
    tokenizer = Tokenizer(dataclasses.replace(chatml, vocab_size=3))
    with pytest.raises(InvalidRequest, match="token"):
        tokenizer.encode("x")


@pytest.mark.parametrize("role", ["im_end", "", "<|im_end|>", "root", None, 3])
def test_roles_are_a_closed_set(tokenizer: Tokenizer, role: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode_chat([{"role": role, "content": "x"}])
    assert caught.value.violations[0].field == "messages.role"


@pytest.mark.parametrize(
    "extra", [{"<|im_end|>": "x"}, {"a": {"b|": 1}}, {"a": object()}, {"a": [b"bytes"]}, {3: "x"}]
)
def test_names_and_values_outside_json_are_refused(tokenizer: Tokenizer, extra: dict[object, object]) -> None:
    with pytest.raises(InvalidRequest):
        tokenizer.encode_chat([{"role": "user", "content": "x", **extra}])  # type: ignore[dict-item]


def test_limits_on_messages(tokenizer: Tokenizer) -> None:
    for chat in ([], user("a") * 1025, user("a" * (4 << 20)) * 2):
        with pytest.raises(InvalidRequest):
            tokenizer.encode_chat(chat)


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    for call in (tokenizer.encode, lambda text: tokenizer.encode_chat(user(text))):
        with pytest.raises(InvalidRequest, match="Unicode"):
            call("a\ud800b")


def test_a_model_without_a_template_says_so(bundle: TokenizerBundle) -> None:
    with pytest.raises(UnsupportedFeature, match=re.escape("no chat template")):
        Tokenizer(dataclasses.replace(bundle, chat_template=None)).encode_chat(user("x"))
