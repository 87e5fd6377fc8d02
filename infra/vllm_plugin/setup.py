"""Builds the package `draftline_vllm` from the plug-in's modules in stages/drafters: one source, no copy of it in the repository."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = "draftline_vllm"
SOURCE = "stages.drafters"
MODULES = ("__init__", "heads", "vllm_dspark", "vllm_plugin")
"""All that vLLM imports; a test holds that they import nothing else of this repository."""


class BuildPlugin(build_py):
    """Takes `MODULES` alone out of their folder; they name each other in full, so the names change with the package."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        return [module for module in super().find_package_modules(package, package_dir) if module[1] in MODULES]

    def build_module(self, module: str, module_file: str, package: str) -> tuple[str, bool]:
        built, copied = super().build_module(module, module_file, package)
        path = Path(built)
        path.write_text(path.read_text(encoding="utf-8").replace(f"{SOURCE}.", f"{PACKAGE}."), encoding="utf-8")
        return built, copied


setup(
    packages=[PACKAGE],
    package_dir={PACKAGE: "../../" + SOURCE.replace(".", "/")},
    cmdclass={"build_py": BuildPlugin},
    options={"build": {"build_base": "../../build/vllm_plugin"}},
)
