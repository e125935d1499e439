"""Text and chats to token ids, and ids back to text.

User text never yields a special token: whatever it spells stays text. Only the model's own chat template
writes special tokens. Not here: reading model files, stop strings, decoding piece by piece (`incremental`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.errors import InvalidRequest, ModelError, UnsupportedFeature
from pdserve.tokenizer.bundle import TokenizerBundle
from pdserve.tokenizer.control import ControlFinder, install_stand_ins, special_tokens, spell_out
from pdserve.tokenizer.decode_steps import compile_decoder
from pdserve.tokenizer.guard import Conversation, Rendered, render_guarded
from pdserve.tokenizer.native import load_native
from pdserve.tokenizer.templates import ChatTemplate


class Tokenizer:
    """Encodes and decodes for one bundle. Immutable after construction; may be used from several threads.

    Raises ModelError when the bundle's tokenizer or chat template can not be used.
    """

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.bundle = bundle
        self._parsing = load_native(bundle.tokenizer_json)
        self._plain = load_native(bundle.tokenizer_json)
        for native in (self._parsing, self._plain):
            native.no_truncation()
            native.no_padding()
        # As loaded, special tokens are parsed; the setting is in no file.
        self._parsing.encode_special_tokens = False
        self._special = special_tokens(self._parsing)
        self._special_texts = frozenset(token.content for token in self._special.values())
        self._finder = ControlFinder(self._parsing)
        self._control = install_stand_ins(self._plain)
        self._template = ChatTemplate(bundle.chat_template) if bundle.chat_template else None
        self.new_decode_steps = compile_decoder(_decoder_spec(bundle.tokenizer_json))
        self._raw_steps = self.new_decode_steps()
        self._raw: dict[int, bytes] = {}

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Ids of a plain prompt. special_tokens: with what the model wants before it (BOS). Those that the
        text spells stay text."""
        return self._encode_plain(_checked(text), add_special_tokens=special_tokens)

    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one."""
        return self._template

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The special tokens by their texts."""
        return self._control.ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of a conversation in the model's chat template; special tokens in what users wrote stay text.

        messages: mappings with "role" and "content". tools: as transformers' templates take them. options:
        further variables, none of the user's text. Raises InvalidRequest for a conversation the template
        refuses, UnsupportedFeature if the model has no template.
        """
        if self._template is None:
            raise UnsupportedFeature("The model has no chat template: send a prompt instead of messages.")
        conversation = Conversation.checked(messages, tuple(self._control.ids), tools)
        named = dict(self.bundle.special_tokens)
        variables = {**(options or {}), **named, "add_generation_prompt": add_generation_prompt}
        rendered = render_guarded(self._template, conversation, variables)
        _checked(rendered.text)
        if rendered.tainted is None:  # nothing the user wrote can be part of a special token
            return self._within(self._parsing.encode(rendered.text, add_special_tokens=False).ids)
        return self._encode_mixed(rendered)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Incomplete characters at the end become U+FFFD, as in the library."""
        return str(self._parsing.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str | None:
        """The vocabulary's spelling of one id, or None for an id that has none."""
        text: str | None = self._parsing.id_to_token(token_id)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id puts into the midst of a text, be they a part of a character; a special token
        is spelled. Empty for an id that has no text."""
        found = self._raw.get(token_id)
        if found is None:
            found = self._raw[token_id] = self._token_bytes(self.token_text(token_id) or "")
        return found

    def _token_bytes(self, text: str) -> bytes:
        if self.is_special(text):
            return text.encode()
        for step in self._raw_steps:
            made = step.raw(text)
            if isinstance(made, bytes):
                return made
            text = made
        return text.encode()

    def is_special(self, token_text: str) -> bool:
        """Whether a token of this spelling is left out of decoded text."""
        return token_text in self._special_texts

    def _encode_mixed(self, rendered: Rendered) -> list[int]:
        """Encodes a chat of which some characters are the user's: those never become special tokens."""
        assert rendered.tainted is not None
        text, at = [], 0
        for token_id, start, end in self._finder.find(rendered.tainted):
            text += [rendered.text[at:start], self._control.stand_in[token_id]]
            at = end
        text.append(rendered.text[at:])
        return self._encode_plain("".join(text), add_special_tokens=False)

    def _encode_plain(self, text: str, *, add_special_tokens: bool) -> list[int]:
        encoding = self._plain.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        for token_id, added in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if token_id in self._control.real_id:
                ids.append(self._control.real_id[token_id])
            elif token_id in self._special and not added:
                ids.extend(self._as_text(token_id))
            else:
                ids.append(token_id)
        return self._within(ids)

    def _within(self, ids: list[int]) -> list[int]:
        # Some tokenizers know tokens that their model has no embedding for.
        if max(ids, default=0) >= self.bundle.vocab_size:
            raise InvalidRequest("The text needs a token that this model does not have.")
        return ids

    def _as_text(self, token_id: int) -> list[int]:
        """A special token that the vocabulary built from plain letters, taken apart again."""
        pieces = spell_out(self._plain, token_id)
        if any(i in self._special for i in pieces):
            raise InvalidRequest("The text holds a control token of this model: remove it.")
        return pieces


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest("The text is not valid Unicode: it holds half of a surrogate pair.") from None
    return text


def _decoder_spec(tokenizer_json: bytes) -> Mapping[str, Any] | None:
    spec = json.loads(tokenizer_json).get("decoder")
    if spec is not None and not isinstance(spec, dict):
        raise ModelError("The model's tokenizer.json has a damaged decoder.")
    return spec
