"""The chat request: what is supported, with types and ranges; everything else is an ApiError.

Clients send many fields that ask for nothing. `Neutral` tables name them, and the values with which
they ask for nothing; with any other value they would have an effect that we do not have, and are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kt_core.serve.errors import ApiError

MAX_STOPS = 100  # the OpenAI API has 4, vLLM no limit; each is looked for at every token

Neutral = Mapping[str, tuple[object, ...]]
"""By field: values, or types any value of which asks for nothing. A null does so everywhere."""

# Of the OpenAI API.
_OPENAI: Neutral = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": (dict,),  # for a store of answers, which there is not
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (bool,),  # of calls that cannot come
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_key": (str,),  # where to look for a cache; answers are the same
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (str,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (str,),  # who asks
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),  # among no tools
    "tools": ([],),
    "top_logprobs": (0,),
    "user": (str,),  # who asks
    "verbosity": ("medium",),
    "web_search_options": (),
}

# Which vLLM adds, and others after it; its defaults.
_VLLM: Neutral = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (str,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "request_id": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "top_k": (0, -1),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

# Clients send back the messages that they were sent, with whatever servers had put there.
_MESSAGE: Neutral = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "id": (str,),
    "provider_specific_fields": ({},),
    "reasoning": ("",),
    "reasoning_details": ([],),
    "refusal": (),
    "thinking_blocks": ([],),
    "tool_calls": ([],),
}


def _asks_for_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    def same(one: object) -> bool:
        if isinstance(one, type):
            return type(value) is one
        number = type(one) in (int, float) and type(value) in (int, float)
        return (number or type(one) is type(value)) and one == value

    return any(map(same, neutral))


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return value
    raise ValueError("a string or a list of text parts is needed")


def _as_stops(value: object) -> object:
    """A list of the stop strings that are not empty."""
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list):
        return [string for string in strings if string != ""]
    return strings


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, given: Any) -> Any:
        """A null stands for the default, as in the OpenAI API."""
        if not isinstance(given, dict):
            return given
        kept = {}
        for key, value in given.items():
            if value is None:
                continue
            if key not in cls.neutral:
                kept[key] = value
            elif not _asks_for_nothing(value, cls.neutral[key]):
                raise PydanticCustomError("has_effect", "{field}", {"field": key, "value": value})
        return kept


class TextPart(_Strict):
    neutral = {"prompt_cache_breakpoint": ()}

    type: Literal["text"]
    text: str


class Message(_Strict):
    neutral = _MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)]
    name: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, str]:
        """What the chat template sees; it decides what a name and earlier reasoning are for."""
        role = "system" if self.role == "developer" else self.role  # the newer word for it
        more = {"name": self.name, "reasoning_content": self.reasoning_content}
        return {"role": role, "content": self.text} | {k: v for k, v in more.items() if v}


class StreamOptions(_Strict):
    neutral = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}

    include_usage: bool = False


class ChatRequest(_Strict):
    neutral = {**_OPENAI, **_VLLM}

    model: str
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)  # what torch.manual_seed takes
    stop: Annotated[list[str], Field(max_length=MAX_STOPS), BeforeValidator(_as_stops)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def parse(body: Any) -> ChatRequest:
    """The request in the decoded JSON `body`; raises ApiError 400 naming the field."""
    if not isinstance(body, dict):
        raise ApiError(400, "The request body must be a JSON object.")
    try:
        request = ChatRequest.model_validate(body)
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
    where = [*first["loc"]]
    if first["type"] == "has_effect":
        where.append(first["ctx"]["field"])
    path = ".".join(str(part) for part in where)
    path = re.sub(r"\.(\d+)", r"[\1]", path)
    if first["type"] == "has_effect":
        value = _short(first["ctx"]["value"])
        message = f"'{path}' with the value {value} is not supported by this server; remove it."
    elif first["type"] == "extra_forbidden":
        message = f"'{path}' is not supported by this server; remove it."
    elif first["type"] == "missing":
        message = f"'{path}' is required."
    else:
        message = f"'{path}' has the value {_short(first['input'])}: {first['msg']}."
    return ApiError(400, message, param=path)


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
