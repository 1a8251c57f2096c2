"""Invariants, each broken by one edit of the source, and the tests that must notice.

An edit replaces ``old``, which stands once in the file, by ``new``. What is broken is named by the
invariant, so that a survivor says what no test asks for.
"""

from __future__ import annotations

from typing import NamedTuple

_SIGNALS = "language/signals.py"
_TIMEOUT_WORD = "kernels/common/peers.py"
_EPOCHS = "kernels/common/slots/epochs.py"
_PROTOCOL = "kernels/common/exchange/protocol.py"
_TILES = "kernels/common/scatter/tiles.py"
_CONTEXT = "kernels/common/context.py"
_SUMMING = "kernels/common/scatter/algorithms.py"
_GATHERED = "kernels/common/slots/gathered.py"
_SHARDED = "kernels/common/gemm/sharded.py"
_ROUTING = "kernels/common/moe/routing.py"
_PRODUCT = "kernels/common/moe/product.py"
_PUSHES = "kernels/nvidia/gemm_reduce_scatter/algorithms.py"
_TOPK_SUM = "kernels/common/moe/topk_sum.py"
_COLUMNS = "kernels/common/moe/columns.py"
_AGREEMENT = "_tuning/engine/agreement.py"
_VARIED = "_tuning/engine/inputs.py"
_ATTEMPT = "_tuning/engine/trial.py"
_CANDIDATES = "_tuning/engine/candidates.py"
_NEIGHBOURS = "_tuning/sizes/neighbours.py"
_STORE = "_tuning/store/file.py"
_SPECIALISATION = "runner/specialisation.py"
_ARTEFACT = "runner/artefact.py"
_RUNNER = "runner/function.py"
_SCALES = "kernels/common/gemm/scales.py"
_EP_KERNEL = "kernels/nvidia/expert_parallel/kernel.py"
_EP_GROUP_GEMM = "kernels/nvidia/ep_group_gemm/kernel.py"
_ULYSSES_KERNEL = "kernels/nvidia/ulysses/kernel.py"
_ULYSSES_GEMM = "kernels/nvidia/ulysses_gemm/kernel.py"
_DECODE_KERNEL = "kernels/nvidia/decode_attention/kernel.py"
_DECODE_PACKETS = "kernels/nvidia/decode_attention/packets.py"

SIGNALS = ("tests/language/test_signals.py",)
EACH_OP = "tests/distributed/test_each_op.py"
COLLECTIVES = ("tests/distributed/test_collectives.py", EACH_OP)
GEMM_RS = ("tests/distributed/test_summed_gemm.py",)
GEMM_AR = GEMM_RS
AG_GEMM = ("tests/distributed/test_ag_gemm.py", EACH_OP)
SCALED_GEMMS = ("tests/distributed/test_scaled_gemms.py",)
ROUTING = ("tests/kernels/test_routing.py",)
GROUPED = ("tests/kernels/test_grouped_gemm.py",)
AG_GROUPED = ("tests/distributed/test_ag_group_gemm.py", EACH_OP)
TOPK_SUMS = ("tests/kernels/test_moe_reduce.py",)
MOE_SUMS = ("tests/distributed/test_moe_sums.py",)
EXPERT_PARALLEL = ("tests/distributed/test_ep.py",)
EP_GROUP_GEMM = ("-k", "fused_products", "tests/distributed/test_ep.py")
SP_ATTENTION = ("tests/distributed/test_sp_attention.py",)
EP_LAYERS = ("tests/layers/test_ep_moe.py",)
ULYSSES = ("tests/distributed/test_ulysses.py",)
ULYSSES_GEMM = ("tests/distributed/test_ulysses_gemm.py",)
DECODE_ATTENTION = ("tests/distributed/test_decode_attention.py",)
STORE = ("tests/tuning/test_store.py",)
RUNNER = ("tests/compile/test_runner.py",)
MEETINGS = ("tests/tuning",)
VARIED = ("tests/tuning/test_measure.py",)


class Mutant(NamedTuple):
    """One broken invariant; ``path``: of the file, from ``python/triton_dist`` on."""

    invariant: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "expert parallel: a fused tile with rows of peers waits for all of them",
        _EP_GROUP_GEMM,
        "count = num_copy_programs * ep_plan.NUM_RANKS",
        "count = 0",
        EP_GROUP_GEMM,
    ),
    Mutant(
        "expert parallel: arbitrary counts select no fused tiles",
        _EP_GROUP_GEMM,
        "tl.maximum(tl.minimum(end_own_tile, num_tiles) - first, 0)",
        "tl.maximum(end_own_tile - first, 0)",
        EP_GROUP_GEMM,
    ),
    Mutant(
        "expert parallel: only fused tiles whose rows are all this rank's do not wait",
        _EP_GROUP_GEMM,
        "tl.store(record + 6, 0 if run == 0 else 1, mask=mask)",
        "tl.store(record + 6, 0, mask=mask)",
        EP_GROUP_GEMM,
    ),
    Mutant(
        "attention: partial results are merged by their sums of exponentials",
        "kernels/nvidia/sp_ag_attention/kernel.py",
        "part * (part_weight / total)[:, None]",
        "part * (weight / total)[:, None]",
        SP_ATTENTION,
    ),
    Mutant(
        "attention: a part is read after it has arrived",
        "kernels/nvidia/sp_ag_attention/kernel.py",
        "    dl.wait(pushed.arrivals + source, 1, value, timeout_words_at(pushed.epoch), True)\n",
        "",
        SP_ATTENTION,
    ),
    Mutant(
        "ulysses: blocks begin after the blocks of earlier sources",
        _ULYSSES_KERNEL,
        "return first_token.to(tl.int64) * batch * plan.TOTAL_WIDTH",
        "return first_token.to(tl.int64) * plan.TOTAL_WIDTH",
        ULYSSES,
    ),
    Mutant(
        "ulysses: ranks that share a KV head receive the same head",
        _ULYSSES_KERNEL,
        "peer // plan.RANKS_PER_HEAD[i] * plan.WIDTHS[i]",
        "peer % plan.RANKS_PER_HEAD[i] * plan.WIDTHS[i]",
        ULYSSES,
    ),
    Mutant(
        "ulysses: gradients of a shared KV head are added",
        _ULYSSES_KERNEL,
        "value += x.to(tl.float32)",
        "value = x.to(tl.float32)",
        ULYSSES,
    ),
    Mutant(
        "ulysses: a tile of the output projection waits for its last rows",
        _ULYSSES_GEMM,
        "range(first_row // chunk_rows, last_row // chunk_rows + 1)",
        "range(first_row // chunk_rows, last_row // chunk_rows)",
        ULYSSES_GEMM,
    ),
    Mutant(
        "expert parallel: positions of routes are an exclusive prefix sum",
        _EP_KERNEL,
        "tl.cumsum(aligned, 0) - aligned",
        "tl.cumsum(aligned, 0)",
        EXPERT_PARALLEL,
    ),
    Mutant(
        "expert parallel: a dispatch waits for the rows of every program",
        _EP_KERNEL,
        "count = num_senders * ep_plan.NUM_RANKS",
        "count = num_routing_programs * ep_plan.NUM_RANKS",
        EXPERT_PARALLEL,
    ),
    Mutant(
        "expert parallel: a call does not accept the flags of an earlier one",
        _EP_KERNEL,
        "epoch = counter // _CALL_STEP + 1",
        "epoch = 1 + 0 * counter",
        EXPERT_PARALLEL,
    ),
    Mutant(
        "expert parallel: rows travel only after the peer has begun the call",
        _EP_KERNEL,
        "await_programs(peers, phase, 0, chunk_flag(call, 0), ep_plan)",
        "pass",
        EXPERT_PARALLEL,
    ),
    Mutant(
        "expert parallel: received sums are cleared for the next call",
        "kernels/nvidia/expert_parallel/combine.py",
        "clear_packets(packets.words, line, is_sent[peer])",
        "clear_packets(packets.words, line, is_sent[peer] & (index < 0))",
        EXPERT_PARALLEL,
    ),
    Mutant(
        "expert parallel: combines of few tokens alternate between slots",
        "kernels/nvidia/expert_parallel/combine.py",
        "slot = (call.epoch % 2).to(tl.int32)",
        "slot = (call.epoch % 1).to(tl.int32)",
        EXPERT_PARALLEL,
    ),
    Mutant(
        "expert parallel: a call claims items from the first one on",
        _EP_KERNEL,
        "tl.store(peers.calls + claim_counter_index(epoch + 1), 0)",
        "pass",
        EXPERT_PARALLEL,
    ),
    Mutant(
        "expert parallel: a weight is applied once",
        "kernels/nvidia/expert_parallel/combine.py",
        "tl.load(ep_layout.weights + position, mask=exists, other=0.0)",
        "tl.load(ep_layout.weights + position, mask=exists, other=0.0) * 0.5",
        EXPERT_PARALLEL,
    ),
    Mutant(
        "expert parallel: a call does not accept the packets of an earlier one",
        "kernels/common/exchange/packet_calls.py",
        "return tl.load(epochs_ptr + tl.program_id(0)) + 1",
        "return 0 * tl.load(epochs_ptr + tl.program_id(0)) + 1",
        EXPERT_PARALLEL,
    ),
    Mutant(
        "decode attention: an output is weighted by the LSE of its own rank",
        _DECODE_PACKETS,
        "source_lse = tl.where(source < rank, lses[source], source_lse)",
        "source_lse = tl.where(source < rank, own_lse, source_lse)",
        DECODE_ATTENTION,
    ),
    Mutant(
        "decode attention: a shard's first key is at the end of the shards before it",
        _DECODE_KERNEL,
        "position = first_position + index",
        "position = first_position + index + (rank > 0).to(tl.int32)",
        DECODE_ATTENTION,
    ),
    Mutant(
        "decode attention: keys after the end of a shard are invisible",
        _DECODE_KERNEL,
        "in_keys = key < end_key",
        "in_keys = key <= end_key",
        DECODE_ATTENTION,
    ),
    Mutant(
        "decode attention: parts are read after all programs have stored them",
        _DECODE_PACKETS,
        "dl.wait(counter_ptr, 1, arrived, packets.timeout_words, TAGGED=True)",
        "pass",
        DECODE_ATTENTION,
    ),
    Mutant(
        "decode attention: a call does not accept the packets of an earlier one",
        _DECODE_PACKETS,
        "clear_packets(shards[peer], line, in_row)",
        "pass",
        DECODE_ATTENTION,
    ),
    Mutant(
        "expert parallel: an expert's tiles begin at its first position",
        "kernels/common/moe/sorted_rows.py",
        "begin_row = tl.sum(tl.where(lane == expert, begin, 0), 0)",
        "begin_row = tl.sum(tl.where(lane == expert, begin, 0), 0) * 0",
        EP_LAYERS,
    ),
    Mutant(
        "expert parallel: the gradient of a product has the weight of its choice",
        "kernels/common/moe/activation.py",
        "            grad *= weight\n",
        "",
        EP_LAYERS,
    ),
    Mutant(
        "expert parallel: gradients of routing weights return to the token's rank",
        "layers/nvidia/expert_parallel.py",
        "collectives.reduce_scatter(route_gradients)",
        "route_gradients",
        EP_LAYERS,
    ),
    Mutant(
        "expert parallel: kept tokens are not those of a later dispatch",
        "layers/nvidia/expert_parallel.py",
        "expanded(replace(received, rows=rows))",
        "expanded(received)",
        EP_LAYERS,
    ),
    Mutant(
        "expert parallel: experts are chosen from the best groups",
        "layers/nvidia/tp_moe.py",
        'biased_scores.masked_fill(~is_chosen[..., None], float("-inf"))',
        "biased_scores",
        EP_LAYERS,
    ),
    Mutant(
        "fp8: long sums are promoted to fp32",
        _SCALES,
        "accumulation = FAST_ACCUM if self.use_fast_accum else PROMOTED_ACCUM",
        "accumulation = FAST_ACCUM",
        ("tests/compile/test_scaled_gemm_kernels.py",),
    ),
    Mutant(
        "fp8: each step along K has its own block of scales",
        _SCALES,
        "b_scale_ptr += k // SCALE_BLOCK * scales.stride_bk",
        "b_scale_ptr += 0",
        ("tests/kernels/test_scaled_gemm.py",),
    ),
    Mutant(
        "fp8: a gathered shard has its own rank's scales",
        _SCALES,
        "return scales.gathered_scales + shard.to(tl.int64) * scales.stride_shard",
        "return scales.gathered_scales + shard.to(tl.int64) * 0",
        SCALED_GEMMS,
    ),
    Mutant(
        "fp8: a row block has the scales of its rows of A",
        "kernels/common/scatter/kernel.py",
        "scales, scales_of_shard(scales, None, SCALING), row_block * rows + row, SCALING,",
        "scales, scales_of_shard(scales, None, SCALING), row, SCALING,",
        SCALED_GEMMS,
    ),
    Mutant(
        "fp8: each all-gather sends the scales of its call, not of an earlier one",
        _GATHERED,
        "        if scales is not None:\n",
        "        if scales is not None and len(self._prepared_gathers) <= 2:\n",
        SCALED_GEMMS,
    ),
    Mutant(
        "fp8: rows have the scales of the rank that sent them",
        "kernels/common/moe/product.py",
        "scales.a, scales.own, a_row,",
        "scales.own, scales.own, a_row,",
        ("tests/distributed/test_scaled_moe.py",),
    ),
    Mutant(
        "wait: until the flag has reached the value, not nearly",
        _SIGNALS,
        "status = tl.where(seen - value < 0, _LATE, _REACHED)",
        "status = tl.where(seen - value < -1, _LATE, _REACHED)",
        SIGNALS,
    ),
    Mutant(
        "wait: for every flag, not the first",
        _SIGNALS,
        "        index += 1\n    return agree",
        "        index += count\n    return agree",
        SIGNALS,
    ),
    Mutant(
        "wait: for each chunk of a tile's rows",
        _SHARDED,
        "count = last_row // chunk_rows - first + 1",
        "count = last_row // chunk_rows - first",
        ("tests/distributed/test_failures.py", *AG_GEMM),
    ),
    Mutant(
        "wait: an own tile waits for every peer",
        _TILES,
        "    token = 0\n    for step in range(1, NUM_RANKS):\n        source = (rank + step)",
        "    token = 0\n    for step in range(1, NUM_RANKS - 1):\n        source = (rank + step)",
        GEMM_RS,
    ),
    Mutant(
        "wait: another size ends the waits of all memories of the context",
        _SIGNALS,
        "other = tl.load(words + _NEXT_WORDS)",
        "other = timeout_words.to(tl.int64)",
        ("tests/kernels/test_epochs.py",),
    ),
    Mutant(
        "reset: timeout words stay in the ring",
        _TIMEOUT_WORD,
        "        yield\n        self.disagreements.link()\n",
        "        yield\n",
        ("tests/kernels/test_epochs.py",),
    ),
    Mutant(
        "release: a flag is set with release",
        _SIGNALS,
        'tl.atomic_xchg(ptr, value, mask=mask, sem="release", scope="sys")',
        'tl.atomic_xchg(ptr, value, mask=mask, sem="relaxed", scope="sys")',
        ("tests/compile/test_language.py",),
    ),
    Mutant(
        "release: all threads' stores come before it",
        _SIGNALS,
        '    tl.debug_barrier()\n    with mark("notify"):',
        '    with mark("notify"):',
        ("tests/compile/test_language.py",),
    ),
    Mutant(
        "release: every rank is told",
        _PROTOCOL,
        "valid = tl.arange(0, plan.LANES) < plan.NUM_RANKS\n    values",
        "valid = tl.arange(0, plan.LANES) < plan.NUM_RANKS - 1\n    values",
        COLLECTIVES,
    ),
    Mutant(
        "release: an exchange tells with release",
        _PROTOCOL,
        "dl.notify(call.flags + flag_offset(phase, value, plan.NUM_RANKS), values, mask=valid)",
        "tl.store(call.flags + flag_offset(phase, value, plan.NUM_RANKS), values, mask=valid)",
        ("tests/compile/test_exchange_kernels.py",),
    ),
    Mutant(
        "epoch: it advances at the end of a call",
        _EPOCHS,
        "tl.store(epoch_ptr, flag + _ONE_EPOCH)",
        "tl.store(epoch_ptr, flag)",
        GEMM_RS,
    ),
    Mutant(
        "epoch: calls take turns between two slots",
        _EPOCHS,
        "self.index = self.next_index\n        if self.num_ranks == 1:",
        "self.index = 0\n        if self.num_ranks == 1:",
        ("tests/kernels/test_epochs.py", "tests/kernels/test_allgather.py", *GEMM_RS),
    ),
    Mutant(
        "epoch: a slot is not written to before peers have consumed it",
        _EPOCHS,
        "last_epoch = (epoch_at(epoch_ptr) - 1).to(tl.int32)",
        "last_epoch = (epoch_at(epoch_ptr) - 2).to(tl.int32)",
        ("tests/kernels/test_epochs.py", "tests/kernels/test_allgather.py", *AG_GEMM),
    ),
    Mutant(
        "epoch: an exchange counts its calls",
        _PROTOCOL,
        'sem="relaxed", scope="gpu") // MAX_CTAS + 1',
        'sem="relaxed", scope="gpu") // MAX_CTAS',
        COLLECTIVES,
    ),
    Mutant(
        "reset: flags are what they were at first",
        _EPOCHS,
        "self.region_of_slot(slot, region).local.zero_()",
        "self.region_of_slot(slot, region)",
        ("tests/kernels/test_epochs.py", "tests/kernels/test_contexts.py", *GEMM_RS),
    ),
    Mutant(
        "reset: of every memory of a context",
        _CONTEXT,
        "        for memory in self._memories:\n            memory.reset()",
        "        for memory in self._memories[:1]:\n            memory.reset()",
        ("tests/kernels/test_contexts.py", "tests/benchmarks/test_bench_overlap.py", *GEMM_RS),
    ),
    Mutant(
        "reset: a failed allocation frees what is there",
        _CONTEXT,
        "        except BaseException:\n            self.free()\n            raise",
        "        except BaseException:\n            raise",
        ("tests/kernels/test_contexts.py",),
    ),
    Mutant(
        "bound: no more rows than the memory holds",
        _SUMMING,
        "if self.A.shape[0] > max_rows and",
        "if self.A.shape[0] > max_rows + 1 and",
        GEMM_AR,
    ),
    Mutant(
        "bound: no more chunks than there are flags for",
        _SUMMING,
        "_CHUNKS = range(1, MAX_CHUNKS + 1)",
        "_CHUNKS = range(0, MAX_CHUNKS + 2)",
        ("tests/distributed/test_every_op.py", *GEMM_RS),
    ),
    Mutant(
        "row mask: the last row is stored",
        _TILES,
        "mask = (first_row + tl.arange(0, ROWS_PER_STEP) < rows)",
        "mask = (first_row + tl.arange(0, ROWS_PER_STEP) < rows - 1)",
        GEMM_RS,
    ),
    Mutant(
        "row mask: nothing above a tile's row block is stored",
        _TILES,
        "inside = (local_row >= -row) & (local_row < rows - row)",
        "inside = local_row < rows - row",
        GEMM_RS,
    ),
    Mutant(
        "row mask: the last element of a shard is copied",
        _PROTOCOL,
        "in_shard = index < lengths.shard\n        received_ptr",
        "in_shard = index < lengths.shard - 1\n        received_ptr",
        COLLECTIVES,
    ),
    Mutant(
        "deferred tiles: what is deferred is noted",
        _TILES,
        "            tl.store(deferred_ptr + tl.program_id(0), 1)\n"
        "            decision = MUST_DEFER",
        "            decision = MUST_DEFER",
        ("tests/kernels/test_deferred.py",),
    ),
    Mutant(
        "deferred tiles: the note is read before it is cleared",
        _TILES,
        "tl.debug_barrier()  # All warps must have",
        "pass  # All warps must have",
        ("tests/compile/test_gemm_rs_kernels.py",),
    ),
    Mutant(
        "deferred tiles: programs that have begun are counted anew in each call",
        _TILES,
        "        tl.store(slot.epoch + NUM_BEGUN_WORD, 0)\n",
        "        tl.store(slot.epoch + NUM_BEGUN_WORD, tl.load(slot.epoch + NUM_BEGUN_WORD))\n",
        ("tests/kernels/test_deferred.py",),
    ),
    Mutant(
        "agreement: two ranks that differ are told",
        _AGREEMENT,
        "if len({text for _, text in pairs}) > 1:",
        "if len({text for _, text in pairs}) > 2:",
        MEETINGS,
    ),
    Mutant(
        "agreement: an own record goes before a shipped one",
        _AGREEMENT,
        "ranks_with_record = own or list(valid)",
        "ranks_with_record = list(valid)",
        MEETINGS,
    ),
    Mutant(
        "agreement: a record counts what all ranks hold alike",
        _AGREEMENT,
        "if summary.winner_digest and summary.bound_names in (None, bound_names)",
        "if summary.winner_digest",
        MEETINGS,
    ),
    Mutant(
        "agreement: ranks vary their calls as often",
        _VARIED,
        "if len(set(results)) > 1:",
        "if len(set(results)) > 2:",
        VARIED,
    ),
    Mutant(
        "samples: a sample of several calls is their mean",
        _ATTEMPT,
        "round(max(each) / len(batches[0]), 6)",
        "round(max(each), 6)",
        VARIED,
    ),
    Mutant(
        "samples: the slowest input counts if the function asks for it",
        _ATTEMPT,
        "is_worst = self._tuned_fn.hooks.worst_input",
        "is_worst = False",
        VARIED,
    ),
    Mutant(
        "samples: a config is sampled by all calls",
        _ATTEMPT,
        "for args, kwargs in calls:",
        "for args, kwargs in calls[:1]:",
        VARIED,
    ),
    Mutant(
        "sizes: who learned from others teaches nobody",
        _NEIGHBOURS,
        "[each.record for each in self.neighbours if not each.record.warm_started_from]",
        "[each.record for each in self.neighbours]",
        ("tests/tuning/test_sizes.py",),
    ),
    Mutant(
        "sizes: neighbours that could not try a kind of config do not leave it out",
        _CANDIDATES,
        "neighbours is not None and neighbours.tried_all_kinds(kept)",
        "neighbours is not None",
        ("tests/tuning/test_sizes.py",),
    ),
    Mutant(
        "routing: a route goes behind those of its segment before it",
        _ROUTING,
        "(lane[None, :] < lane[:, None])",
        "(lane[None, :] > lane[:, None])",
        ROUTING,
    ),
    Mutant(
        "routing: a segment goes behind those of its chunk before it",
        _ROUTING,
        "count[None, :] + tl.cumsum(counted, 0) - counted,",
        "tl.cumsum(counted, 0) - counted,",
        ROUTING,
    ),
    Mutant(
        "routing: an id below 0 is nobody's",
        _ROUTING,
        "(expert >= 0) & (expert < E)",
        "(expert >= -1) & (expert < E)",
        ROUTING,
    ),
    Mutant(
        "routing: a product goes where its route is, unless sorted",
        _PRODUCT,
        "out = rows if grouped_plan.SORTED else route",
        "out = rows",
        GROUPED,
    ),
    Mutant(
        "routing: a tile waits for the last shard that it has rows of",
        _ROUTING,
        "    while awaited_position < last_position:",
        "    while awaited_position < last_position - 1:",
        AG_GROUPED,
    ),
    Mutant(
        "routing: who has waited for a shard has waited for all before it",
        _ROUTING,
        "_token = 0\n    while awaited_position < last_position:",
        "_token = 0\n    awaited_position = tl.maximum(awaited_position, last_position - 1)\n"
        "    while awaited_position < last_position:",
        AG_GROUPED,
    ),
    Mutant(
        "routing: own rows are read where they lie, the others where they arrive",
        _ROUTING,
        "(row < (rank + 1) * shard_rows)",
        "(row <= (rank + 1) * shard_rows)",
        AG_GROUPED,
    ),
    Mutant(
        "route sum: a route that is nobody's adds nothing",
        _TOPK_SUM,
        "has_expert = valid & (expert >= 0) & (expert < E)",
        "has_expert = valid & (expert >= 0)",
        TOPK_SUMS,
    ),
    Mutant(
        "route sum: columns of a chunk lie behind those before it",
        _TOPK_SUM,
        "rows_per_block.to(tl.int64) * first_column",
        "rows_per_block.to(tl.int64) * 0",
        TOPK_SUMS,
    ),
    Mutant(
        "route sum: a chunk is awaited by its own flag",
        _COLUMNS,
        "await_pushed(pushed, current, chunk, rank, NUM_RANKS)",
        "await_pushed(pushed, current, 0, rank, NUM_RANKS)",
        MOE_SUMS,
    ),
    Mutant(
        "agreement: ranks come with the same experts",
        "kernels/common/agreement.py",
        "{hashlib.sha256(data).hexdigest()[:16]}",
        "{hashlib.sha256(octets).hexdigest()[:0]}",
        MOE_SUMS,
    ),
    Mutant(
        "runner: what an artefact needs of an argument is looked for",
        _SPECIALISATION,
        "if launch_specialisation.attributes.get(path, {}).get(attribute) != needed:",
        "if False:",
        RUNNER,
    ),
    Mutant(
        "runner: a number that a call makes a constant must be divisible too",
        _SPECIALISATION,
        "and value % needed == 0:",
        "and value % needed >= 0:",
        RUNNER,
    ),
    Mutant(
        "runner: members of tuples are compared, and how many there are",
        _SPECIALISATION,
        "*(path for path in launch_specialisation.leaves if path not in self.leaves),",
        "",
        RUNNER,
    ),
    Mutant(
        "runner: the launcher passes what the artefact takes",
        _RUNNER,
        "specialisation = artefact.metadata.specialisation",
        "specialisation = launch_specialisation",
        RUNNER,
    ),
    Mutant(
        "runner: half a cubin reaches no driver",
        _ARTEFACT,
        "and max(ends) <= len(data)",
        "and min(ends) >= 0",
        RUNNER,
    ),
    Mutant(
        "store lock: under it a file is looked at again",
        _STORE,
        "if is_locked and _is_damaged(path):",
        "if is_locked:",
        STORE,
    ),
    Mutant(
        "store lock: it is waited for",
        _STORE,
        "        lock.acquire(poll_interval=0.01)\n",
        "        pass\n",
        STORE,
    ),
    Mutant(
        "wait: what peers wait for is queued before any garbage is collected",
        _PUSHES,
        "with no_garbage_collection():",
        "if True:",
        GEMM_RS,
    ),
    Mutant(
        "store: a temporary file of a writer at work stays",
        _STORE,
        "st_mtime > _STALE_AGE_SECONDS",
        "st_mtime > -_STALE_AGE_SECONDS",
        STORE,
    ),
)
