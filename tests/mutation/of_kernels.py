"""Bugs of the host's side of kernels: what tables say of addresses, ranges, slots and tiles."""

from tests.mutation import Mutant

LAUNCH = ("tests/kernels/test_launch_table.py",)
EXCHANGE = ("tests/kernels/test_exchange.py",)
STEP = (
    "tests/kernels/test_step_table.py::test_every_owned_element_is_stepped_once_with_what_belongs_to_it",
    "tests/kernels/test_step_table.py::test_every_part_of_an_expert_has_a_slot_of_its_own_for_its_amax",
    "tests/kernels/test_step_table.py::test_dropped_moments_are_freed_where_launches_know_their_addresses",
)
DIRECTED = (
    "tests/kernels/test_directed_updates.py::test_kernels_step_and_encode_pieces_as_the_whole",
)
REQUANTIZE = ("tests/kernels/test_requantize.py::test_whole_weights_are_the_references",)
NORM = ("tests/kernels/test_norm.py::test_sums_of_tensors_of_many_sizes",)
AMAX = ("tests/kernels/test_amax.py",)

MUTANTS = (
    Mutant(  # offsets within a tile of very wide buffers leave 32 bits
        "kernels/launch_table.py",
        "reach = widest * height",
        "reach = widest",
        LAUNCH,
    ),
    Mutant(  # memory of an odd number of bytes is zeroed in units of two
        "kernels/launch_table.py",
        "if not consumed.is_contiguous() or (end - start) % 2:",
        "if not consumed.is_contiguous():",
        LAUNCH,
    ),
    Mutant(  # the last block row of an expert, which is not high enough, belongs to nobody
        "kernels/table_entry.py",
        "end = high if high == numel else high // block_row * block_row",
        "end = high // block_row * block_row",
        LAUNCH,
    ),
    Mutant(  # weights of one launch share amax slots
        "kernels/launch_table.py",
        "own = (first_free_slot + AMAX_SLOTS * (first + index) for",
        "own = (first_free_slot + AMAX_SLOTS * index for",
        LAUNCH,
    ),
    Mutant(  # a member ends where its parameter does
        "kernels/launch_table.py",
        "(entry.end - numbers * numel).clamp(max=numel),",
        "entry.end - numbers * numel,",
        LAUNCH,
    ),
    Mutant(  # the last elements of an expert are left out of its amax
        "kernels/cutting.py",
        "counts = (numels + length - 1) // length",
        "counts = (numels // length).clamp(min=1)",
        LAUNCH,
    ),
    Mutant(  # large gaps are described twice
        "kernels/launch_table.py",
        "for address in range(start, end, 2 * _MAX_GAP)",
        "for address in range(start, end, _MAX_GAP)",
        LAUNCH,
    ),
    Mutant(  # experts at odd addresses are read 16 bytes at a time
        "kernels/launch_table.py",
        "distances += [buffer.stride(0)] if buffer.shape[0] > 1 else []",
        "distances += []",
        LAUNCH,
    ),
    Mutant(  # what a cut does not divide is exchanged
        "kernels/exchange.py",
        "if offset % block_row and key not in block_rows:",
        "if key not in block_rows:",
        EXCHANGE,
    ),
    Mutant(  # slots follow the order in which a rank names cuts
        "kernels/exchange.py",
        "for cut in sorted(set(cuts)):",
        "for cut in dict.fromkeys(cuts):",
        EXCHANGE,
    ),
    Mutant(  # a cut between two experts is one inside of the second
        "kernels/exchange.py",
        "if format.has_global_amax and offset and expert not in global_amaxes:",
        "if format.has_global_amax and expert not in global_amaxes:",
        EXCHANGE,
    ),
    Mutant(  # block rows lie where amaxes of shared experts do
        "kernels/exchange.py",
        "        slot += AMAX_SLOTS * experts\n",
        "        slot += 0\n",
        EXCHANGE,
    ),
    Mutant(  # sources of other launches are zeroed before they are read
        "kernels/member_table.py",
        "if consumed is None or len(groups) != 1 or",
        "if consumed is None or not groups or",
        LAUNCH,
    ),
    Mutant(  # launches of a table find amaxes in each other's slots
        "kernels/member_table.py",
        "first_free_slot=slots + sum(owned[:index]),",
        "first_free_slot=slots,",
        LAUNCH,
    ),
    Mutant(  # a part of a range finds its amax where the first one does
        "kernels/update.py",
        "parts = torch.stack([which, start, end, slot[which] + numbers], 1)",
        "parts = torch.stack([which, start, end, slot[which]], 1)",
        STEP,
    ),
    Mutant(  # what follows the last whole block is not stepped
        "kernels/update.py",
        "                self._add_range(ranges, state, base, part.end_whole, part.high)\n",
        "",
        STEP,
    ),
    Mutant(  # hyper-parameters of one group, clip factors of another
        "kernels/update.py",
        "return [*columns, state.group, state.norm, place]",
        "return [*columns, state.norm, state.group, place]",
        STEP,
    ),
    Mutant(  # weights find their amaxes in each other's slots
        "kernels/update.py",
        "named = dict(zip(experts, range(first, num_slots, AMAX_SLOTS), strict=True))",
        "named = dict(zip(experts, range(0, num_slots, AMAX_SLOTS)))",
        DIRECTED,
    ),
    Mutant(  # a table that watches some tensors looks at all
        "kernels/step_table.py",
        "return replace(self, states=(), places=Places(tensors))",
        "return replace(self, states=())",
        STEP,
    ),
    Mutant(  # a chunk is encoded from the beginning of its shard
        "kernels/update.py",
        "start = member.entry.start + first",
        "start = member.entry.start",
        ("tests/kernels/test_chunks.py::test_chunks_leave_no_trace",),
    ),
    Mutant(  # what lies before a gradient in its cache line is summed with it
        "kernels/norm.py",
        "begins = (begin[which] - first).clamp(min=0)",
        "begins = torch.zeros_like(first)",
        NORM,
    ),
    Mutant(  # groups that do not come in order share sums
        "kernels/norm.py",
        "ordered = sorted(owned, key=lambda one: one.group)  # stable",
        "ordered = list(owned)",
        NORM,
    ),
    Mutant(  # of gradients in several pieces of memory one is watched
        "kernels/norm.py",
        "places=Places.of_each_memory(one.values for one in owned),",
        "places=Places(one.values for one in owned[:1]),",
        ("tests/kernels/test_norm.py",),
    ),
    Mutant(  # rows that begin at no word are moved as words
        "kernels/member_table.py",
        "if any(word % 4 for word in words) or any(size % pack for size in sizes):",
        "if any(size % pack for size in sizes):",
        LAUNCH,
    ),
    Mutant(  # padded scales of the second expert lie in those of the first
        "kernels/member_table.py",
        "copy.data_ptr() + expert * copy.stride(0) * width,",
        "copy.data_ptr() + expert * copy.stride(0),",
        REQUANTIZE,
    ),
    Mutant(  # experts that a rank owns nothing of have no row
        "kernels/amax.py",
        "slot += AMAX_SLOTS * entry.target.shape[0]",
        "slot += AMAX_SLOTS * len(experts)",
        AMAX,
    ),
    Mutant(  # a range over a cut is taken for one between two
        "kernels/table_entry.py",
        "if inside or not {self.start, self.end} <= ends:",
        "if not {self.start, self.end} <= ends:",
        ("tests/test_ops.py::test_a_range_that_does_not_fit_is_refused_by_name",),
    ),
)
