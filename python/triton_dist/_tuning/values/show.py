"""Show encoded values as Python source, such as ``(8192, torch.float16)``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from triton_dist._tuning.values.codec import Tree


def error_text(error: BaseException) -> str:
    """Return the type and the message of an exception. A ``__str__`` that raises is reported."""
    try:
        message = str(error)
    except Exception as failure:
        message = f"(its text raised {type(failure).__name__})"
    return f"{type(error).__name__}: {message}"


def spread(samples: Sequence[float]) -> str:
    """Return the interquartile range divided by the median, as text in percent."""
    if len(samples) < 2:
        return "-"
    first, middle, third = statistics.quantiles(samples, n=4, method="inclusive")
    return f"{(third - first) / middle:.1%}" if middle else "-"


def show(tree: Tree) -> str:
    """Return a tree from :func:`codec.encode` as Python source."""
    if isinstance(tree, list):
        return f"[{_comma(tree)}]"
    if not isinstance(tree, dict) or not tree:
        return repr(tree)
    tag, body = next(iter(tree.items()))
    if tag == "tuple":
        return f"({_comma(body)},)" if len(body) == 1 else f"({_comma(body)})"
    if tag == "dict":
        return "{" + ", ".join(f"{show(name)}: {show(item)}" for name, item in body) + "}"
    if tag in ("set", "frozenset"):
        return f"{tag}([{_comma(body)}])"
    if tag == "triton.Config":
        meta = ", ".join(f"{name!r}: {show(item)}" for name, item in body.items())
        options = "".join(f", {name}={show(item)}" for name, item in tree.items() if name != tag)
        return f"triton.Config({{{meta}}}{options})"
    if tag == "enum":
        cls = _short(body)
        return f"{cls}.{tree['name']}" if "name" in tree else f"{cls}({show(tree['value'])})"
    if tag == "dataclass":
        fields = ", ".join(f"{name}={show(item)}" for name, item in tree["fields"].items())
        return f"{_short(body)}({fields})"
    if tag == "namedtuple":
        return f"{_short(body)}({_comma(tree['items'])})"
    if tag == "partial":
        named = [f"{show(name)[1:-1]}={show(item)}" for name, item in tree["keywords"]["dict"]]
        return f"functools.partial({', '.join([_comma(body), *named])})"
    if tag == "range":
        return f"range({_comma(body)})"
    if tag == "kernel":
        return show(body)
    if tag in ("class", "function"):
        return _short(body)
    if tag == "bytes":
        return repr(bytes.fromhex(body))
    return f"torch.device({body!r})" if tag == "device" else str(body)


def _comma(trees: list[Tree]) -> str:
    return ", ".join(map(show, trees))


def _short(name: str) -> str:
    return name.partition(":")[2].rpartition("<locals>.")[2]
