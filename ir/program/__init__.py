"""The programs of a plan: stages, values, their text, what they take of memory, their order, the copies of them."""

from __future__ import annotations

from .first_fit import FirstFit
from .interface import Interface
from .lanes import (
    WORLD,
    WRITTEN_OUT,
    are_alike,
    bind,
    bind_one,
    bound_interface,
    device_mesh,
    group_name,
    lane_of,
    members_of,
    place_of,
    shown,
    slice_of,
    whole_link,
)
from .memory import (
    ON_DEVICE,
    STAGED,
    Account,
    Home,
    MemoryProfile,
    Persistent,
    bytes_of_homes,
    homes_of,
    largest_values,
    over_budget,
    persistent_bytes,
    place_bytes,
    places_of,
    plan_arena,
    profile_memory,
    takes_place,
)
from .order import Memory, Order, Task, build_order, find_cycle, lack_of, memory_change, producer_of
from .program import Program, donated, infer, infer_all, operands, place_frees, values_of, work_of
from .stage import PAGE, ParamSpec, SavedSpec, StageSpec, TensorSpec, aligned, dtype_bytes
from .text import SHORT_DTYPES, describe, excerpt, line_numbers, parse_program, print_node, print_program, program_lines

__all__ = [
    "ON_DEVICE", "PAGE", "SHORT_DTYPES", "STAGED", "WORLD", "WRITTEN_OUT", "Account", "FirstFit", "Home",
    "Interface", "Memory", "MemoryProfile", "Order", "ParamSpec", "Persistent", "Program", "SavedSpec", "StageSpec",
    "Task", "TensorSpec", "aligned", "are_alike", "bind", "bind_one", "bound_interface", "build_order",
    "bytes_of_homes", "describe", "device_mesh", "donated", "dtype_bytes", "excerpt", "find_cycle", "group_name",
    "homes_of", "infer", "infer_all", "lack_of", "lane_of", "largest_values", "line_numbers", "members_of",
    "memory_change", "operands", "over_budget", "parse_program", "persistent_bytes", "place_bytes", "place_frees",
    "place_of", "places_of", "plan_arena", "print_node", "print_program", "producer_of", "profile_memory",
    "program_lines", "shown", "slice_of", "takes_place", "values_of", "whole_link", "work_of",
]  # fmt: skip
