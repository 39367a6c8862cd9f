"""The chat request: what is supported, with types and ranges; everything else is an ApiError."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from kt_core.serve.errors import ApiError

MAX_STOPS = 4  # as the OpenAI API has it

# Fields of the OpenAI API that ask for nothing when they have one of these values; clients like to
# send them. Any other value would have an effect that we do not have, and is refused.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
}


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return value
    raise ValueError("a string or a list of text parts is needed")


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stop = Annotated[str, StringConstraints(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class StreamOptions(_Strict):
    include_usage: bool = False


class ChatRequest(_Strict):
    model: str
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)  # what torch.manual_seed takes
    stop: Annotated[list[Stop], Field(max_length=MAX_STOPS), BeforeValidator(_as_list)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def parse(body: Any) -> ChatRequest:
    """The request in the decoded JSON `body`; raises ApiError 400 naming the field.

    A null stands for the default, as in the OpenAI API.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "The request body must be a JSON object.")
    given = {key: value for key, value in body.items() if value is not None}
    for key, neutral in _NEUTRAL.items():
        if key in given:
            value = given.pop(key)
            if not any(type(value) is type(x) and value == x for x in neutral):
                raise ApiError(
                    400, f"'{key}' is not supported by this server; remove it.", param=key
                )
    try:
        request = ChatRequest.model_validate(given)
    except ValidationError as error:
        raise _from_pydantic(error) from None
    if request.stream_options is not None and not request.stream:
        raise ApiError(
            400, "'stream_options' has a meaning only with stream: true.", param="stream_options"
        )
    limits = (request.max_tokens, request.max_completion_tokens)
    if None not in limits and limits[0] != limits[1]:
        raise ApiError(
            400,
            f"'max_tokens' is {limits[0]} but 'max_completion_tokens' is {limits[1]}; give one.",
            param="max_tokens",
        )
    return request


def _from_pydantic(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    path = re.sub(r"\.(\d+)", r"[\1]", path)
    if first["type"] == "extra_forbidden":
        message = f"'{path}' is not supported by this server; remove it."
    elif first["type"] == "missing":
        message = f"'{path}' is required."
    else:
        message = f"'{path}' has the value {_short(first['input'])}: {first['msg']}."
    return ApiError(400, message, param=path)


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
