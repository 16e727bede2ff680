"""What every benchmark prints: the machine, and tables."""

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

import specdec_ray


def machine(threads: int) -> str:
    """Processor, cores, versions and threads, in one line."""
    versions = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "specdec_ray": specdec_ray.__version__,
    }
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{_processor()}, {os.cpu_count()} cores, {threads} threads; {named}"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The median and, in brackets, the least and the greatest value."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f} .. {high:.{digits}f}]"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first one flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
