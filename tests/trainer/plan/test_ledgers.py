"""The ledgers point by point of the choice space: what each choice holds, moves and costs, and that nothing is counted twice."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from trainer.config.load import validate_as
from trainer.errors import ConfigError
from trainer.plan.advice import Change, advise, changes, speed_ups, way_to_fit
from trainer.plan.flags import flags
from trainer.plan.hardware import device_names, load_hardware
from trainer.plan.memory import PHASES, PLACES
from trainer.plan.plan import Plan, make_plan, size
from trainer.plan.request import Choices, make_request
from trainer.plan.search import search
from trainer.plan.skeleton import build_card, library, load_card
from trainer.plan.work import adapter_traffic, rate_of

H100 = "h100-80gb"
SMALL_BATCH = {"prompts_per_step": 8, "prompt_tokens": 256.0, "completion_tokens": 256.0}


def plan(model: str = "qwen3-8b", hardware: str = H100, **tree: object) -> Plan:
    tree = {"batch": SMALL_BATCH, **tree}
    return make_plan(make_request("test", load_card(model), load_hardware(hardware), validate_as(Choices, tree, "plan")))


def device(one: Plan, name: str) -> float:
    return one.memory.find("device", name)


# -- memory ------------------------------------------------------------------------------------


def test_every_point_of_the_choice_space_plans() -> None:
    """What trains x rule x residency x schedule x reference x sampler: planned, or refused in words."""
    planned = refused = unhelpful = 0
    space = itertools.product(
        ("full", "lora"),
        ("adamw", "sgd", "stateless"),
        ("resident", "tiered", "sharded", "zero3"),
        ("sync", "colocated", "async"),
        ("none", "adapter_off", "resident", "int8_streamed", "engine", "anchors"),
        ("embedded", "vllm"),
    )
    for method, rule, residency, schedule, reference, engine in space:
        pool = 4 if engine == "vllm" and schedule == "async" else 0
        tree = {
            "devices": 8,
            "train": {"method": method, "rule": rule, "residency": residency},
            "sample": {"engine": engine, "devices": pool},
            "reference": {"kind": reference},
            "schedule": {"kind": schedule},
        }
        try:
            one = plan(**tree)
        except ConfigError as error:
            refused += 1
            unhelpful += "set" not in error.problem
            continue
        planned += 1
        assert one.schedule.step_seconds > 0
        assert all(one.memory.peak(place)[0] > 0 for place in ("device", "host", "disk"))
        assert all(term.bytes > 0 for term in one.memory.terms)
    assert planned > 200
    assert refused > 100
    assert unhelpful == 0


def test_a_phase_is_the_sum_of_its_terms_and_a_peak_the_fullest_phase() -> None:
    one = plan(train={"method": "lora"})
    for place in PLACES:
        totals = {phase: sum(t.bytes for t in one.memory.terms if t.place == place and phase in t.phases) for phase in PHASES}
        assert one.memory.phases(place) == pytest.approx(totals)
        assert one.memory.peak(place)[0] == pytest.approx(max(totals.values()))


def test_16_8_and_2_bytes_a_parameter() -> None:
    parameters = load_card("qwen3-8b").parameters
    names = ("weights", "gradients", "float32 master", "first moments", "second moments")

    def per_parameter(**train: object) -> float:
        one = plan(train=train)
        return sum(device(one, name) for name in names) / parameters

    assert per_parameter(rule="adamw") == pytest.approx(16)
    assert per_parameter(rule="sgd") == pytest.approx(8)
    assert per_parameter(rule="stateless") == pytest.approx(2)
    assert per_parameter(rule="adamw", dtype="float32") == pytest.approx(16)
    assert per_parameter(rule="adamw", master=False) == pytest.approx(12)


def test_sharding_divides_and_gathers() -> None:
    whole, shared = plan(devices=8), plan(devices=8, train={"residency": "zero3"})
    for name in ("weights", "gradients", "first moments"):
        assert device(shared, name) == pytest.approx(device(whole, name) / 8)
    assert device(shared, "gathered layers") == pytest.approx(2 * 2 * load_card("qwen3-8b").embedding)  # the largest unit


def test_tiers_do_not_grow_with_depth() -> None:
    shape = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    }
    shape |= {"num_key_value_heads": 32, "tie_word_embeddings": False}
    held = []
    for layers in (16, 32, 64):
        card = load_card({**shape, "num_hidden_layers": layers})
        tree = {
            "train": {"rule": "stateless", "residency": "tiered", "layer_major": True, "boundary": "host"},
            "batch": SMALL_BATCH,
        }
        tree["sample"] = {"sequences": 1}
        one = make_plan(make_request("x", card, load_hardware(H100), validate_as(Choices, tree)))
        held.append(one.memory.total("device", "train"))
        assert one.memory.find("host", "cold weights") == pytest.approx(card.parameters * 2)
    assert max(held) < 1.01 * min(held)


def test_resident_layers_cost_their_weights() -> None:
    tree = {"rule": "stateless", "residency": "tiered", "layer_major": True}
    none, some = plan(train=tree), plan(train={**tree, "resident_layers": 9})
    layer = load_card("qwen3-8b").largest_block * 2
    assert device(some, "resident layers") == pytest.approx(9 * layer)
    assert some.bandwidth.find("layers loaded").bytes == pytest.approx(0.75 * none.bandwidth.find("layers loaded").bytes)


def test_layer_major_keeps_all_boundaries_and_travels_twice_a_step() -> None:
    tree = {"rule": "stateless", "residency": "tiered"}
    by_batch, by_layer = plan(train={**tree, "layer_major": False}), plan(train={**tree, "layer_major": True})
    micro = by_batch.sizes.num_micro
    assert micro == 8
    assert by_batch.bandwidth.find("layers loaded").bytes == pytest.approx(micro * by_layer.bandwidth.find("layers loaded").bytes)
    ratio = device(by_layer, "activations between layers") / device(by_batch, "activations between layers")
    assert ratio == pytest.approx(micro)


def test_recompute_trades_memory_for_time() -> None:
    kept, again = plan(train={"recompute": False, "rule": "stateless"}), plan(train={"recompute": True, "rule": "stateless"})
    assert again.memory.total("device", "train") < 0.7 * kept.memory.total("device", "train")
    assert again.work.train_flops == pytest.approx(kept.work.train_flops * 4 / 3)


def test_a_layer_is_updated_when_its_activations_are_gone() -> None:
    """Layer by layer the update's copies stand where activations stood; tensor by tensor, in backward, beside them."""
    major = plan(train={"rule": "stateless", "residency": "tiered", "layer_major": True})
    hooked = plan(train={"rule": "stateless"})
    assert device(major, "update workspace") == 0
    assert device(hooked, "update workspace") > 0
    short = plan(
        train={"rule": "stateless", "residency": "tiered", "layer_major": True, "head_chunk_tokens": 1},
        batch={
            **SMALL_BATCH,
            "prompts_per_step": 1,
            "group_size": 1,
            "micro_batch_tokens": 1,
            "prompt_tokens": 1,
            "completion_tokens": 1,
        },
    )
    card = short.request.card
    update, head = 20 * min(card.largest_tensor, 2**24), 2 * card.largest_block
    assert device(short, "activations of one layer, or logits") == pytest.approx(max(update, head), rel=0.01)


def with_hardware(one: Plan, **changes: object) -> Plan:
    return make_plan(replace(one.request, hardware=one.request.hardware.model_copy(update=changes)))


def test_only_groups_with_signal_are_learned_from_unless_a_reference_scores_all() -> None:
    for kind, times in (("none", 0.5), ("anchors", 0.5), ("int8_streamed", 1.0)):
        one = plan(reference={"kind": kind})
        half = with_hardware(one, efficiency=one.request.hardware.efficiency.model_copy(update={"trained_share": 0.5}))
        assert half.work.train_flops == pytest.approx(times * one.work.train_flops)


def test_adapters_cost_traffic_and_operations() -> None:
    few, many = (plan(train={"method": "lora", "lora": {"target_modules": t}}) for t in (["v_proj"], ["v_proj", "down_proj"]))
    values, adapters = adapter_traffic(many.request)
    card = many.request.card
    assert adapters == 2 * card.num_layers
    wide = next(one for one in card.linears if one.name.endswith("down_proj"))
    assert values - adapter_traffic(few.request)[0] == card.num_layers * (10 * wide.d_out + 5 * wide.d_in)
    assert many.work.train_seconds > few.work.train_seconds
    assert adapter_traffic(plan().request) == (0.0, 0.0)


def test_an_update_costs_what_it_reads_and_writes() -> None:
    one = plan(train={"rule": "stateless"})
    rate = one.request.hardware.device.hbm_bytes_per_second
    assert one.work.update_seconds == pytest.approx(32 * 4 * one.request.card.parameters / rate)
    assert plan(train={"rule": "adamw", "optimizer_offload": "host"}).work.update_seconds == 0


def test_a_frozen_backbone_saves_the_gradient_of_its_weights() -> None:
    """Passes: forward, gradient of activations, and of weights where they train; recomputation adds one."""
    passes = {"full": 3, "lora": 2}
    for method, recompute in itertools.product(passes, (False, True)):
        one = plan(train={"method": method, "rule": "adamw", "recompute": recompute})
        assert one.work.multiplier == passes[method] + recompute
        forward = one.request.card.forward_flops(one.sizes.rank_tokens, 256.0) * one.request.choices.batch.passes
        adapters = 4 * one.sizes.trained * one.sizes.rank_tokens * (method == "lora") * one.request.choices.batch.passes
        assert one.work.train_flops == pytest.approx(forward * (passes[method] + recompute) + adapters)


def test_a_layer_major_update_on_a_gpu_costs_its_launches_and_its_journal() -> None:
    """As measured on one H200, beside what it reads and writes (docs/method-s.md)."""
    parameters = load_card("qwen3-8b").parameters
    for split, seconds in ((False, 0.45e-9), (True, 1.4e-9)):
        train = {"rule": "stateless", "layer_major": True, "split": split}
        one = plan(train=train)
        reads = 32 * 4 * parameters / one.request.hardware.device.hbm_bytes_per_second
        assert one.work.update_seconds == pytest.approx(reads + seconds * parameters)
        cpu = plan(hardware="cpu-server", train=train)
        assert cpu.work.update_seconds == pytest.approx(32 * 4 * parameters / cpu.request.hardware.device.hbm_bytes_per_second)


def test_decoding_on_a_cpu_makes_stored_halves_float32() -> None:
    train = {"rule": "stateless", "layer_major": True}
    halves, whole = (plan("qwen3-0.6b", "cpu-server", train={**train, "dtype": dtype}) for dtype in ("bfloat16", "float32"))
    read = [one.work.decode_bytes / one.request.card.parameters for one in (halves, whole)]
    assert read[0] - read[1] == pytest.approx(2.0, rel=0.05), "2 stored, 4 written and read again, against 4"


def test_masters_are_written_and_read_beside_the_weights() -> None:
    one, whole = plan(train={"rule": "adamw"}), plan(train={"rule": "adamw", "dtype": "float32"})
    assert one.sizes.master
    assert not whole.sizes.master
    updates = one.request.choices.batch.passes * one.request.choices.batch.minibatches
    visits = one.sizes.num_micro * one.request.choices.batch.passes
    assert visits > updates
    each = 4 * one.request.card.parameters / one.request.hardware.device.hbm_bytes_per_second
    assert whole.work.update_seconds == pytest.approx(7 * updates * each)
    extra = 3 * updates + 4.5 * (visits - updates)
    assert one.work.update_seconds == pytest.approx((7 * updates + extra) * each)


def test_a_cpu_computes_each_type_at_its_own_rate() -> None:
    one = plan(model="qwen3-0.6b", hardware="cpu-server", train={"rule": "stateless"}, sample={"sequences": 4})
    rate = one.request.hardware.device.training_flops
    faster = one.request.hardware.device.model_copy(update={"bfloat16_flops": 4 * rate, "launch_seconds": 0.0})
    assert rate_of(one.request, one.sizes) == rate
    assert rate_of(with_hardware(one, device=faster).request, one.sizes) == 4 * rate


def test_cold_files_that_fit_are_read_from_the_page_cache() -> None:
    train = {"rule": "stateless", "residency": "tiered", "cold": "disk", "layer_major": True}
    one = plan(model="qwen3-0.6b", train=train)
    assert {one.bandwidth.find(name).link for name in ("layers loaded", "layers written back")} == {"page_cache"}
    small = one.request.hardware.host.model_copy(update={"memory_bytes": 4e9})
    assert with_hardware(one, host=small).bandwidth.find("layers loaded").link == "disk"


def test_references() -> None:
    parameters = load_card("qwen3-8b").parameters
    assert device(plan(reference={"kind": "resident"}), "reference model") == pytest.approx(parameters * 2)
    streamed = plan(reference={"kind": "int8_streamed"})
    assert streamed.memory.find("host", "reference model") == pytest.approx(parameters)
    assert streamed.bandwidth.find("reference streamed").bytes == pytest.approx(parameters * streamed.sizes.num_micro)
    off = plan(train={"method": "lora"}, reference={"kind": "adapter_off"})
    assert device(off, "reference model") == 0
    assert off.work.score_seconds > 0
    anchored = plan(reference={"kind": "anchors"})
    assert anchored.work.score_seconds == 0
    engine = plan(sample={"engine": "vllm", "devices": 1}, reference={"kind": "engine"})
    assert engine.memory.find("sampler", "reference model") == pytest.approx(parameters * 2)


def test_cache_pages_bits_and_host_share() -> None:
    def cache(**sample: object) -> float:
        return plan(sample={"engine": "vllm", **sample}).memory.find("device", "KV cache")

    assert cache(kv_bits=8) == pytest.approx(cache() / 2)
    assert cache(page_tokens=1000) > cache(page_tokens=16)
    assert cache(kv_host_share=0.5) == pytest.approx(cache() / 2)


def test_an_engine_that_sleeps_holds_nothing_while_training() -> None:
    awake, asleep = plan(sample={"engine": "vllm"}), plan(sample={"engine": "vllm", "sleeps": True})
    weights = device(awake, "engine's weights")
    assert awake.memory.total("device", "train") - asleep.memory.total("device", "train") > weights
    assert awake.memory.total("device", "sample") == asleep.memory.total("device", "sample")


def test_colocated_holds_the_cache_while_training() -> None:
    in_turn, together = plan(), plan(schedule={"kind": "colocated"})
    cache = device(together, "KV cache")
    assert together.memory.total("device", "train") - in_turn.memory.total("device", "train") >= cache


def test_offload_moves_the_state() -> None:
    for place in ("host", "disk"):
        one = plan(train={"optimizer_offload": place})
        assert device(one, "first moments") == 0
        assert one.memory.find(place, "first moments") == pytest.approx(load_card("qwen3-8b").parameters * 4)
        assert one.bandwidth.find("gradients down, weights up").exposed_seconds > 0


def test_experts_that_are_spread_are_not_gathered() -> None:
    whole = plan("qwen3-235b-a22b", devices=64, train={"residency": "zero3"})
    spread = plan("qwen3-235b-a22b", devices=64, train={"residency": "zero3", "expert_parallel": 64})
    assert device(spread, "gathered layers") < device(whole, "gathered layers")
    assert spread.bandwidth.find("weights gathered").bytes < 0.1 * whole.bandwidth.find("weights gathered").bytes
    assert spread.bandwidth.find("tokens to experts").bytes > 0
    assert device(spread, "weights") == device(whole, "weights")


def test_a_machine_without_gpus_has_one_memory() -> None:
    one = plan("qwen3-0.6b", "cpu-server", reference={"kind": "int8_streamed"})
    assert [room.place for room in one.verdict.rooms] == ["device", "disk"]
    assert device(one, "reference model") == pytest.approx(load_card("qwen3-0.6b").parameters)
    assert "main memory" in one.verdict.sentence


def test_gradients_take_over_from_activations_of_a_single_micro_batch() -> None:
    one = plan("qwen3-0.6b", batch={**SMALL_BATCH, "micro_batch_tokens": 65536}, train={"dtype": "float32", "recompute": False})
    two = plan("qwen3-0.6b", batch={**SMALL_BATCH, "micro_batch_tokens": 16384}, train={"dtype": "float32", "recompute": False})
    assert one.sizes.num_micro == 1
    saved = device(one, "activations") + device(one, "gradients")
    assert saved < device(two, "activations") * 2 + device(two, "gradients")


# -- time ------------------------------------------------------------------------------------


def test_async_takes_the_slower_of_the_two_and_sync_their_sum() -> None:
    pools = {"engine": "vllm", "devices": 1}
    in_turn = plan(sample=pools)
    beside = plan(sample=pools, schedule={"kind": "async"})
    schedule = beside.schedule
    assert schedule.step_seconds == pytest.approx(max(schedule.sample_seconds, schedule.train_seconds) + schedule.sync_seconds)
    assert in_turn.schedule.step_seconds == pytest.approx(
        schedule.sample_seconds + schedule.train_seconds + schedule.sync_seconds
    )
    assert 0 < schedule.lag_mean <= schedule.lag_max <= 32


def test_lag_grows_with_the_hand_over_interval_and_ends_at_the_bound() -> None:
    def lag(every: int) -> float:
        return plan(sample={"engine": "vllm", "devices": 1, "sync_every": every}, schedule={"kind": "async"}).schedule.lag_mean

    assert lag(1) < lag(10) < lag(20)
    assert lag(100) == 32


def test_money_and_energy_follow_the_hours() -> None:
    one = plan(schedule={"kind": "sync", "steps": 100})
    hours = one.schedule.step_seconds * 100 / 3600
    assert one.schedule.device_hours == pytest.approx(hours)
    assert one.schedule.price == pytest.approx(hours * 2.5)
    assert one.schedule.energy_kwh == pytest.approx(hours * 0.7)


def test_utilisation_is_never_above_one() -> None:
    for kind, engine in (("sync", "embedded"), ("colocated", "embedded"), ("async", "vllm")):
        pool = 1 if engine == "vllm" else 0
        assert 0 < plan(sample={"engine": engine, "devices": pool}, schedule={"kind": kind}).schedule.utilisation <= 1.0001


# -- advice and search ------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [*changes(), *speed_ups()], ids=lambda change: change.name)
def test_every_change_does_something_somewhere(change: Change) -> None:
    starts = [
        plan("qwen3-30b-a3b", devices=8, train={"residency": "zero3", "recompute": False, "slots": 1}, sample={"sequences": 8}),
        plan(devices=8, reference={"kind": "resident"}, train={"residency": "resident"}),
        plan(devices=8, train={"residency": "sharded", "recompute": True}, sample={"engine": "vllm", "devices": 8}),
        plan(train={"method": "lora"}, reference={"kind": "int8_streamed"}, sample={"engine": "vllm"}),
        plan(train={"rule": "stateless", "residency": "tiered", "layer_major": True}, sample={"sequences": 8}),
    ]
    for start in starts:
        request = change.apply(start.request)
        if request is not None and request.valid():
            after = make_plan(request)
            assert after.request != start.request
            assert "{" not in change.says(request)
            if after.as_tree()["memory"] != start.as_tree()["memory"] or after.schedule != start.schedule:
                return
    raise AssertionError(f"{change.name} changes nothing")


def test_a_way_is_ordered_minimal_and_makes_it_fit() -> None:
    start = plan("llama-7b", "rtx-4090-24gb", batch={**SMALL_BATCH, "micro_batch_tokens": 8192})
    assert not start.verdict.fits
    way, fits = way_to_fit(start)
    assert fits
    assert way[-1].after.verdict.fits
    prices = [step.change.price for step in way]
    assert prices == sorted(prices)
    for step, following in itertools.pairwise(way):
        assert following.before is step.after


def test_advice_prefers_settings_to_devices() -> None:
    start = plan(
        "qwen3-8b", sample={"sequences": 512}, batch={**SMALL_BATCH, "prompts_per_step": 64, "completion_tokens": 4096.0}
    )
    assert not start.verdict.fits
    advice = advise(start)
    assert advice.fits_then
    assert "devices" not in {step.change.name for step in advice.fit}


def test_advice_for_what_fits_is_what_is_faster() -> None:
    start = plan("qwen3-0.6b", sample={"sequences": 4})
    advice = advise(start)
    assert not advice.fit
    assert all(s.after.schedule.step_seconds < start.schedule.step_seconds and s.after.verdict.fits for s in advice.faster)
    assert "sequences" in {step.change.name for step in advice.faster}


def test_search_finds_the_smallest() -> None:
    card, hardware = load_card("qwen3-32b"), load_hardware(H100)
    tree = {"devices": 8, "train": {"residency": "sharded", "rule": "stateless"}, "batch": SMALL_BATCH}
    request = make_request("x", card, hardware, validate_as(Choices, tree))
    found = search(request, may_quantise=False)
    assert found.plan is not None
    assert found.plan.verdict.fits
    assert found.plan.request.choices.devices == 1
    quick = search(request, tokens_per_second=2 * found.plan.schedule.tokens_per_second)
    assert quick.plan is not None
    assert quick.plan.request.choices.devices > 1


def test_search_that_finds_nothing_says_nothing_fits() -> None:
    tree = {"train": {"rule": "adamw"}, "batch": SMALL_BATCH}
    request = make_request("x", load_card("dense-1t"), load_hardware("t4-16gb"), validate_as(Choices, tree))
    assert search(request, may_quantise=False).plan is None


# -- words, hardware, cards ------------------------------------------------------------------------------------


def test_a_lag_bound_past_50_is_flagged() -> None:
    one = plan(sample={"engine": "vllm", "devices": 1, "sync_every": 80}, schedule={"kind": "async", "max_lag": 64})
    said = flags(one)
    assert any("oscillate" in sentence for sentence in said)
    assert any("wait at every hand-over" in sentence for sentence in said)


def test_memory_that_malloc_was_told_to_keep_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    here = load_hardware("cpu-server").model_copy(update={"name": "local"})
    one = make_plan(make_request("x", load_card("qwen3-0.6b"), here, validate_as(Choices, {"batch": SMALL_BATCH})))
    assert not any("malloc" in sentence for sentence in flags(one))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert sum("MALLOC_TRIM_THRESHOLD_ is set" in sentence for sentence in flags(one)) == 1, "said once"


def test_sizes_as_people_say_them() -> None:
    assert [size(value) for value in (2.4e12, 1.5e10, 999, 0)] == ["2.4 TB", "15 GB", "999 B", "0 B"]


@pytest.mark.parametrize("name", device_names())
def test_the_hardware_library_is_sound(name: str) -> None:
    hardware = load_hardware(name)
    device = hardware.device
    assert device.peak_flops is None or device.training_flops <= device.peak_flops
    assert hardware.usable_bytes < device.memory_bytes
    assert device.host_link_bytes_per_second <= device.hbm_bytes_per_second


def test_hardware_of_ones_own(tmp_path) -> None:
    file = tmp_path / "box.yaml"
    file.write_text("device: h100-80gb\nmemory_bytes: 94.0e+9\nhost: {memory_bytes: 5.0e+11}\n")
    hardware = load_hardware(str(file))
    assert hardware.device.memory_bytes == 94e9
    assert hardware.device.hbm_bytes_per_second == 3.35e12
    assert (hardware.host.memory_bytes, hardware.host.devices) == (5e11, 8)
    with pytest.raises(ConfigError, match="lacks training_flops"):
        load_hardware({"device": {"memory_bytes": 1e9}, "host": "dgx"})


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({}, r"hardware\.device = None: lacks memory_bytes, .*like: a100-40gb"),
        ({"device": None}, "lacks memory_bytes"),
        ({"device": 5}, "unknown device"),
        ({"device": {"like": "h100"}}, "did you mean 'h100-80gb'"),
        ({"device": "h100-80gb", "memory_bytes": -5}, r"memory_bytes = -5: input should be greater than 0"),
        ({"device": "h100-80gb", "memory_bytes": "80GB"}, "should be a valid number"),
        ({"device": "h100-80gb", "memory_bytes": float("nan")}, "finite"),
        ({"device": "h100-80gb", "host": {"devices": 0}}, r"host\.devices = 0"),
        ({"device": "h100-80gb", "host": {"devices": "eight"}}, r"host\.devices = 'eight'"),
        ({"device": "h100-80gb", "host": {"devices": 2.5}}, r"host\.devices = 2\.5"),
        ({"device": "h100-80gb", "host": [8]}, "must be a known host"),
        ({"device": "h100-80gb", "host": None}, "must be a known host"),
        ({"device": "h100-80gb", "memory": 5}, "unknown key"),
    ],
)
def test_what_no_hardware_can_be_is_named(tree: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_hardware(tree)


def test_this_machine_is_probed_and_remembered(tmp_path) -> None:
    from trainer.plan.probe import probe_local, quick_local

    assert "round figures" in quick_local(tmp_path).notes[0]
    probed = probe_local(tmp_path, state=tmp_path)
    assert probed.device.memory_bytes > 1e8
    assert probed.device.training_flops > 1e8
    assert probed.host.disk_bytes_per_second > 1e5
    assert quick_local(tmp_path).device.training_flops == probed.device.training_flops


@pytest.mark.parametrize("name", [name for name, tree in library().items() if "parameters" not in tree])
def test_kept_and_calculated_cards_are_the_skeletons(name: str) -> None:
    from dataclasses import replace

    built = build_card(dict(library()[name]), name)
    assert replace(load_card(name), assumptions=(), source={}) == replace(built, assumptions=(), source={})
