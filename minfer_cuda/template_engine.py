"""Jinja as Hugging Face sets it up, in minijinja; and the loop of the process it runs in.

The process answers one JSON line with one JSON line. It runs under limits of the system, because
fuel alone does not stop every template: a value that holds itself overflows the stack, doubled
lists and filters fill the memory. See `template_process`, the other end.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from minijinja import Environment
from minijinja import TemplateError as EngineError

from minfer_cuda.errors import TemplateError
from minfer_cuda.template_methods import METHODS, methods_as_filters
from minfer_cuda.template_process import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

FUEL = 10_000_000  # instructions of one rendering, about a second; a chat takes some 30 a message
CPU_SECONDS = 3  # of one rendering; fuel ends what burns it long before
MEMORY_BYTES = 1 << 29  # of the whole process, which takes 40 MiB for a chat
STACK_BYTES = 8 << 20  # Linux's own default, which `make` and others lift
MAX_TEXT = 1 << 24  # characters of a prompt: more than any model's context holds
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def render(source: str, values: Mapping[str, Any], now: datetime) -> str:
    """The text of a template. `now` is what `strftime_now` reads. Raises TemplateError."""
    try:
        environment = _compiled(source)
        environment.add_global("strftime_now", now.strftime)
        text: str = environment.render_template("chat_template", **values)
    except EngineError as error:
        raise TemplateError(str(error.message)) from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # of Python's filters
        raise TemplateError(str(error)) from error
    except MemoryError as error:
        raise TemplateError("it takes too much memory") from error
    if len(text) > MAX_TEXT:
        raise TemplateError(f"it makes a prompt of {len(text)} characters, {MAX_TEXT} at most")
    return text


@lru_cache(maxsize=1)
def _compiled(source: str) -> Environment:
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.fuel = FUEL
    environment.add_filter("tojson", _tojson)
    environment.add_global("raise_exception", _raise_exception)
    for name in METHODS:
        environment.add_filter(name, getattr(str, name))
    # Training masks; an `if` in their place keeps what they do to the white space around.
    source = _GENERATION.sub(
        lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source
    )
    environment.add_template("chat_template", methods_as_filters(source))
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face defines it: no HTML escapes, Python's separators. Characters for private use
    stay as they are under `ensure_ascii` too: the caller has to find its own again."""
    text = json.dumps(
        value,
        ensure_ascii=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    if not ensure_ascii:
        return text
    escaped = r"[^\x00-\x7f\ue000-\uf8ff\U000f0000-\U0010ffff]"
    return re.sub(escaped, lambda match: json.dumps(match[0])[1:-1], text)


def _raise_exception(message: object) -> None:
    raise Refusal(str(message))


def serve() -> None:
    """Answer requests until stdin ends: `source`, `values`, `now` give `text`, `refusal` or
    `error`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other end
    with suppress(TemplateError):  # loads what errors and dates need, while files can be opened
        render("{{ strftime_now('%c') | tojson }}{{ 1 + [] }}", {}, datetime.min)
    _limit_process()
    for line in sys.stdin:
        request = json.loads(line)
        _limit_time()
        try:
            now = datetime.fromisoformat(request["now"])
            answer = {"text": render(request["source"], request["values"], now)}
        except Refusal as error:
            answer = {"refusal": str(error)}
        except TemplateError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def _limit_process() -> None:
    """Memory, stack, and no further file: as far as this system has such limits."""
    with suppress(ImportError):
        import resource

        limits = {
            "RLIMIT_AS": MEMORY_BYTES,
            "RLIMIT_STACK": STACK_BYTES,
            "RLIMIT_NOFILE": 0,
            "RLIMIT_CORE": 0,
        }
        for name, most in limits.items():
            with suppress(AttributeError, ValueError, OSError):
                resource.setrlimit(getattr(resource, name), (most, most))


def _limit_time() -> None:
    """Processor seconds from here on; then the system ends the process."""
    with suppress(ImportError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime) + CPU_SECONDS + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
