"""On the path of a Python that is to load another build of the native core: HOTROW_NATIVE names its file."""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec


class Finder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "hotrow._native":
            return None
        return importlib.util.spec_from_file_location(name, os.environ["HOTROW_NATIVE"])


sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
