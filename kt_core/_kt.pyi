# The extension that csrc/bind.cpp defines; kt_core/runtime.py and kt_core/experts.py give it types.
from typing import Any

def __getattr__(name: str) -> Any: ...
