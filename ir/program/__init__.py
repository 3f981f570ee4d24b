"""The programs of a plan: their stages, values, text, memory and order, and the lanes that run copies of them."""

from __future__ import annotations

from ..stages.flat import Segment
from ..stages.forms import FIRST_FORM, FORM, MOST_FORMS, larger_interface, part_of_form, why_unlike
from ..stages.hooks import Earlier, HookCall, elementwise
from ..stages.interface import Interface, shard_key, sizes_spec
from ..stages.row_part import whole_params, wrong_parts
from ..stages.sizes import SIZES, SizeRange, Sizes, found_sizes, sizes_of, value_of, wrong_expression
from ..stages.stage import (
    HOOK_PORTION_ELEMENTS,
    PAGE,
    AgainSpec,
    Exchange,
    ParamSpec,
    RowPart,
    SavedSpec,
    StageSpec,
    TeamPart,
    TensorSpec,
    UnpackedSpec,
    aligned,
    dtype_bytes,
)
from .communicators import (
    MESSAGE_BLOCKS,
    NcclMemory,
    add_communicator_waits,
    connections_of_group,
    gpu_connections,
    message_communicators,
    pair_of,
    reserve_communicators,
    ring_of,
)
from .drain import Drain, computed_again, drain_of
from .graphs import StageGraphs, graph_bytes, graphs_of_stages, no_graphs_text, reasons_without_graphs
from .host_order import add_host_waits, judging_op, losses_of
from .lanes import (
    WORLD,
    WRITTEN_OUT,
    are_alike,
    bind,
    bind_one,
    bound_interface,
    copies_group,
    group_name,
    holders,
    lane_of,
    members_of,
    norm_device,
    place_of,
    shown,
    slice_of,
    team_of,
)
from .memory import (
    ON_DEVICE,
    Account,
    MemoryProfile,
    Persistent,
    StageHome,
    budget_excess_text,
    bytes_of_homes,
    homes_of,
    largest_values,
    persistent_bytes,
    place_bytes,
    places_of,
    plan_arena,
    profile_memory,
    takes_place,
)
from .order import Memory, Order, Task, build_order, find_cycle, join_orders, memory_change
from .places import ArenaPlaces
from .pools import pooled_bytes, pools_of
from .program import (
    Program,
    donated_operands,
    infer,
    infer_all,
    link_turn_of,
    micro_batch_of,
    operands,
    place_frees,
    producer_of,
    result_index,
    takes_turns,
    values_of,
    work_of,
)
from .seats import Seats, seats_of
from .shares import first_micro_batches, share_of
from .text import SHORT_DTYPES, describe, excerpt, line_numbers, parse_program, print_node, print_program, program_lines
