"""Subclasses of Triton's ``Autotuner`` with a ``run`` of their own, as libraries have them."""

from __future__ import annotations

from typing import Any

import triton
from triton.runtime.autotuner import Autotuner


class Table:
    """A library's table of winners: knows ``in`` and ``[]``, and could lie on disk."""

    def __init__(self) -> None:
        self.rows: dict[Any, str] = {}
        self.written: list[Any] = []

    def __contains__(self, key: Any) -> bool:
        return key in self.rows

    def __getitem__(self, key: Any) -> triton.Config:
        name, value = self.rows[key].split(": ")[:2]
        return triton.Config({name: int(value.split(",")[0])})

    def __setitem__(self, key: Any, config: triton.Config) -> None:
        self.written.append(config)
        self.rows[key] = str(config)


class TableTuner(Autotuner):
    """Looks in its own table, by keys of its own; else prunes, and benches by itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache = Table()  # type: ignore[assignment]
        self.benched: list[int] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        key = f"n is {self.nargs['n']}"
        if key not in self.cache:
            self.cache[key] = self.search(self.prune_configs(kwargs), args, kwargs)
        self.best_config = self.cache[key]
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())

    def search(self, configs: list[Any], args: Any, kwargs: Any) -> Any:
        for config in configs:
            self.benched.append(config.kwargs["BLOCK"])
            self.fn.run(*args, **kwargs, **config.all_kwargs())
        return configs[0]


class SuperTuner(Autotuner):
    """Does something of its own around Triton's ``run``, with a table that is no dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache = Table()  # type: ignore[assignment]
        self.around = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.around += 1
        return super().run(*args, **kwargs)


class LoneTuner(Autotuner):
    """Comes to nothing of Triton's."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[-1].all_kwargs())


def tuned_by(kind: type[Autotuner], kernel: Any, configs: list[Any], **options: Any) -> Any:
    return kind(kernel, kernel.arg_names, configs, ["n"], None, None, **options)
