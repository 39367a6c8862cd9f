"""From token ids to text that is safe to send: whole characters, never part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for an incomplete character


class Detokenizer:
    """Decodes a growing list of ids; a character that is split over tokens comes out when complete.

    Only a short window is decoded at each step. The window starts at a token before the new ones,
    because some tokenizers write the first token of a text differently (without its space).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._old = 0  # tokens of the window whose text was sent completely
        self._sent = 0  # characters of the window's text that were sent

    def push(self, token: int) -> str:
        """The text that became certain with `token`; often one word, sometimes nothing."""
        self._window.append(token)
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        out = certain[self._sent :]
        self._sent = max(self._sent, len(certain))
        if certain == text:
            self._window = self._window[self._old :]
            self._old = len(self._window)
            self._sent = len(self._decode(self._window))
        return out

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


class StopFilter:
    """Ends a text before the first occurrence of any stop string, which itself never comes out.

    The end of the text is held back as long as it could be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What can be sent of the held text and `text`; sets `stopped` at a stop string."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        if found:
            out, self._held, self.stopped = self._held[: min(found)], "", True
            return out
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        """What was held, once no more text can follow."""
        out, self._held = self._held, ""
        return out

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that is a beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
