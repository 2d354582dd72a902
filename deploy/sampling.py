"""The sampling options of the command line, once for every command that has them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer


class Bias(NamedTuple):
    """One ``--logit-bias``."""

    token_id: int
    value: float

    @classmethod
    def parse(cls, text: str) -> Bias:
        """Read ``ID=VALUE``. Which ids and values there are, the gateway knows.

        Raises:
            BadParameter: it is none.
        """
        token_id, equals, value = text.partition("=")
        try:
            if not equals or not token_id.isdecimal():
                raise ValueError
            return cls(int(token_id), float(value))
        except ValueError:
            raise typer.BadParameter(
                f"{text!r}: must be ID=VALUE, a token id and a number from -100 to 100, as 198=-5"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What a command may ask of an answer: a field is an option, its default the option's."""

    max_tokens: Annotated[int, typer.Option(help="Tokens to generate, at most.")] = 128
    min_tokens: Annotated[int, typer.Option(help="Nothing ends the answer before so many.")] = 0
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest tokens of this mass; 1: all.")
    ] = 1.0
    top_k: Annotated[int, typer.Option(help="Draw from so many likeliest tokens; 0: all.")] = 0
    min_p: Annotated[
        float, typer.Option(help="Least probability, as a part of the likeliest's.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 makes repeating less likely.")
    ] = 1.0
    frequency_penalty: Annotated[
        float, typer.Option(help="-2 to 2: less likely by so much for each time it was generated.")
    ] = 0.0
    presence_penalty: Annotated[
        float, typer.Option(help="-2 to 2: less likely by so much once it was generated.")
    ] = 0.0
    logit_bias: Annotated[
        list[Bias] | None,
        typer.Option(
            parser=Bias.parse,
            metavar="ID=VALUE",
            help="Added to the logit of a token id, -100 to 100; may be repeated.",
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", help="Token id that ends the answer; may be repeated."),
    ] = None
    include_stop_str_in_output: Annotated[
        bool, typer.Option(help="Keep the stop string in the text.")
    ] = False
    ignore_eos: Annotated[
        bool, typer.Option(help="Go on behind the model's own end of an answer.")
    ] = False
    skip_special_tokens: Annotated[
        bool, typer.Option(help="Leave control tokens out of the text.")
    ] = True
    exact: Annotated[
        bool, typer.Option("--exact", help="FP16 in every step, where weights may give way.")
    ] = False

    def __post_init__(self) -> None:
        """Raises BadParameter: a token id has two biases."""
        ids = [bias.token_id for bias in self.logit_bias or ()]
        for token_id in ids:
            if ids.count(token_id) > 1:
                raise typer.BadParameter(f"--logit-bias: {token_id} is named more than once")

    def options(self) -> dict[str, Any]:
        """The SDK's options (``deepinfer.client.Options``)."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return found | {
            "stop": tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "logit_bias": dict(self.logit_bias or ()),
        }


def sampling_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command's parameter ``sampling`` an option for each field of ``Sampling``.

    Args:
        defaults: those of this command, where they are not the fields' own.
    """
    hints = get_type_hints(Sampling, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    given = [
        inspect.Parameter(
            field.name,
            keyword,
            default=defaults.get(field.name, field.default),
            annotation=hints[field.name],
        )
        for field in fields(Sampling)
    ]

    def give(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_options(**arguments: Any) -> None:
            sampling = Sampling(**{option.name: arguments.pop(option.name) for option in given})
            command(sampling=sampling, **arguments)

        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            if parameter.name == "sampling":
                parameters += given
            else:
                parameters.append(parameter.replace(kind=keyword))
        # What typer reads a command's options from.
        vars(with_options)["__signature__"] = signature.replace(parameters=parameters)
        with_options.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_options

    return give
