"""Settings that pyproject.toml has no place for."""

import tempfile

from setuptools import setup
from setuptools.command.build import build


class Build(build):
    """Build in an empty folder: ``build/`` keeps modules that have been removed from the tree."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.folder = tempfile.TemporaryDirectory()
        self.build_base = self.folder.name


setup(cmdclass={"build": Build})
