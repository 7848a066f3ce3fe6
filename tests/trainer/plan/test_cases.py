"""The published bills (TB = 10^12, GB = 10^9): each is a plan file, each figure is found in its ledger.

Where a source disagrees with arithmetic, the plan sides with arithmetic and says so in words.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.load import validate_as
from trainer.plan.advice import advise
from trainer.plan.bandwidth import Flow
from trainer.plan.flags import flags, model_state
from trainer.plan.hardware import load_hardware
from trainer.plan.memory import PHASES
from trainer.plan.plan import Plan, make_plan
from trainer.plan.request import Choices, make_request, read_plan, request_of
from trainer.plan.search import compare
from trainer.plan.skeleton import load_card

PLANS = Path(__file__).parents[3] / "recipes" / "plans"
TB, GB, GIB = 1e12, 1e9, 2.0**30


def plan_of(name: str, **changes: object) -> Plan:
    request = request_of(read_plan(PLANS / f"{name}.yaml"))
    return make_plan(request.change(**changes) if changes else request)


def plan(model: str, hardware: str = "h100-80gb", **tree: object) -> Plan:
    return make_plan(make_request("test", load_card(model), load_hardware(hardware), validate_as(Choices, tree)))


def said(plan: Plan, *words: str) -> bool:
    return any(all(word in sentence for word in words) for sentence in flags(plan))


def test_1_dense_trillion_with_adamw_takes_16_tb_and_200_devices() -> None:
    state = model_state(plan_of("conventional-1t"))
    tera = {name: round(size / TB, 6) for name, size in state.items()}
    assert tera == {"weights": 2, "gradients": 2, "float32 master": 4, "first moments": 4, "second moments": 4}
    assert said(plan_of("conventional-1t"), "16 B a parameter", "16 TB", "alone fills 200 devices of 80 GB")


def test_2_reference_copy_and_activations_push_it_to_500_to_1000_devices() -> None:
    usual = plan_of("conventional-1t")
    choices = usual.request.choices
    assert usual.memory.find("device", "reference model") * choices.devices == pytest.approx(2 * TB)
    assert usual.memory.find("sampler", "engine's weights") * choices.sample.devices == pytest.approx(2 * TB)
    assert usual.verdict.fits
    assert 500 <= usual.schedule.devices <= 1000
    assert not plan_of("conventional-1t", devices=400).verdict.fits
    found = compare(load_card("dense-1t"), load_hardware("h100-80gb"))[0].plan
    assert found is not None
    assert 500 <= found.schedule.devices <= 1000


def test_3_method_s_leaves_60_gb_of_80() -> None:
    stateless = plan_of("stateless-1t")
    assert stateless.memory.find("device", "weights") == pytest.approx(20 * GB)
    assert stateless.request.hardware.device.memory_bytes - stateless.memory.find("device", "weights") == pytest.approx(60 * GB)
    assert set(model_state(stateless)) == {"weights"}
    on_host, hosts = stateless.memory.find("host", "reference model"), stateless.request.hardware.hosts(100)
    assert hosts in (12, 13)
    assert on_host * hosts == pytest.approx(1 * TB)
    assert on_host == pytest.approx(80 * GB, rel=0.05)
    assert stateless.verdict.fits


def test_4_the_published_batch_is_one_rank() -> None:
    stateless = plan_of("stateless-1t")
    assert said(stateless, "4,096 x 512 = 2.1M tokens is one data-parallel rank")
    assert said(stateless, "one micro-step is 0.41M tokens", "accumulation of 5.12", "0.21B tokens")
    assert stateless.sizes.num_micro == pytest.approx(5.12)
    agreed = plan_of("stateless-1t", batch__accumulation=1, batch__tokens_per_step=409600.0)
    assert not said(agreed, "data-parallel rank")


def micro_step(tokens: int = 4096, devices: int = 100) -> tuple[Plan, Flow]:
    one = plan_of(
        "stateless-1t",
        batch__tokens_per_step=float(tokens * devices),
        batch__accumulation=None,
        batch__micro_batch_tokens=tokens,
        devices=devices,
    )
    return one, one.bandwidth.find("weights gathered")


def test_5_the_network_binds_below_6000_tokens() -> None:
    one, gathered = micro_step()
    assert gathered.bytes / 3 == pytest.approx((1 - 1 / 100) * 2 * TB)
    assert gathered.seconds / 3 == pytest.approx(39.6, abs=0.05)
    assert gathered.seconds == pytest.approx(119, abs=0.5)
    assert one.work.multiplier == 4
    assert 2 * one.request.card.multiplied_parameters * 4096 == pytest.approx(8.2e15, rel=0.01)
    assert one.work.train_seconds == pytest.approx(82, rel=0.01)
    assert gathered.threshold_tokens == pytest.approx(6000, rel=0.03)
    assert not gathered.hidden
    assert said(one, "the network binds", "5,900 tokens per device")
    wide, hidden = micro_step(6200)
    assert hidden.hidden
    assert not said(wide, "weights gathered: the network binds")


def test_6_method_l_as_published_does_not_fit() -> None:
    published = plan_of("lora-async-1.2t-as-published")
    assert not published.verdict.fits
    assert said(published, "2.4 TB in bfloat16", "1.92 TB", "do not fit as written")
    assert said(published, "engine's weights are 2.4 TB", "640 GB", "do not fit as written")
    advice = advise(published)
    names = [step.change.name for step in advice.fit]
    assert advice.fits_then
    assert "INT8 backbone" in names
    assert "4-bit engine" in names
    assert not {"devices", "sampling devices"} & set(names)
    quantised = plan_of("lora-async-1.2t")
    assert quantised.verdict.fits
    assert quantised.memory.find("device", "weights") * 24 == pytest.approx(1.2 * TB)
    assert quantised.memory.find("sampler", "engine's weights") * 8 == pytest.approx(0.6 * TB)
    assert said(quantised, "leave 40 GB", "8 devices: tight")
    tiered = plan_of("lora-async-1.2t", train__dtype="bfloat16", train__residency="tiered")
    assert tiered.verdict.fits


def test_7_an_adapter_of_2b_takes_32_gb_and_small_ones_are_not_offloaded() -> None:
    adapter = plan_of("adapter-2b")
    assert sum(size for name, size in model_state(adapter).items() if name != "weights") == pytest.approx(32 * GB)
    assert not said(adapter, "advised against")
    small = adapter.request.choices.train.lora.model_copy(update={"parameters": 0.4e9})
    choices = adapter.request.change(train__lora=small).choices
    advised = make_plan(make_request("small", adapter.request.card, adapter.request.hardware, choices))
    assert said(advised, "offload is advised against", "0.4B parameters")


def test_9_fused_update_of_a_7b_model() -> None:
    lomo = plan_of("lomo-7b")
    memory = lomo.memory
    parameters = memory.find("device", "weights") / GIB
    gradients = memory.find("device", "gradient of one tensor") / GIB
    activations = (
        sum(memory.find("device", name) for name in ("activations between layers", "activations of one layer, or logits")) / GIB
    )
    assert parameters == pytest.approx(12.55, abs=0.01)
    assert gradients == pytest.approx(0.24, abs=0.01)
    assert activations == pytest.approx(1.79, rel=0.2)
    assert parameters + gradients + activations == pytest.approx(14.58, rel=0.1)
    for rule, published in (("adamw", 102.2), ("sgd", 52.0)):
        state = sum(model_state(plan_of("lomo-7b", train__rule=rule)).values()) / GIB
        assert state + activations == pytest.approx(published, rel=0.1)


def test_10_65b_fits_eight_24_gb_devices() -> None:
    assert plan_of("lomo-65b").verdict.fits
    assert not plan_of("lomo-65b", train__rule="adamw").verdict.fits


def test_11_ten_billion_on_a_quarter_of_the_devices() -> None:
    usual, stateless = plan_of("conventional-10b"), plan_of("stateless-10b")
    assert usual.verdict.fits
    assert stateless.verdict.fits
    assert stateless.schedule.devices / usual.schedule.devices == 0.25
    assert stateless.memory.peak("device")[0] == pytest.approx(58 * GB, rel=0.1)
    assert stateless.schedule.tokens_per_second / usual.schedule.tokens_per_second == pytest.approx(0.7, abs=0.15)


def test_12_kimi_k2_on_256_devices() -> None:
    usual = plan_of("conventional-kimi-k2")
    assert sum(model_state(usual).values()) / 256 == pytest.approx(65 * GB, rel=0.02)
    assert usual.verdict.fits
    assert usual.request.card.active_parameters == pytest.approx(32e9, rel=0.05)


def tiered(tokens: int, **changes: object) -> tuple[float, Flow]:
    """One device, one micro-batch a step, so that a visit has these tokens; no attention to speak of."""
    train = {"method": "full", "rule": "stateless", "residency": "tiered", "layer_major": True, **changes}
    batch = {
        "prompts_per_step": 1,
        "group_size": 1,
        "prompt_tokens": 1.0,
        "completion_tokens": 1.0,
        "tokens_per_step": float(tokens),
        "micro_batch_tokens": tokens,
    }
    one = plan("llama-65b", train=train, batch=batch)
    return one.work.train_seconds, one.bandwidth.find("layers loaded")


def test_13_layers_hide_behind_enough_tokens() -> None:
    """A layer of b bytes hides when tokens >= b x FLOP/s / (2 x parameters x link); for bf16 and forward only FLOP/s / link."""
    compute, loaded = tiered(4096)
    flops, link = 400e12, 50e9
    forward_only = flops / link
    assert forward_only == 8000
    # Two loads beside four forwards of compute: half the threshold of a forward alone.
    assert loaded.threshold_tokens == pytest.approx(forward_only * 2 / 4, rel=0.03)
    assert loaded.seconds == pytest.approx(2 * loaded.bytes / 2 / link)
    assert compute > 0
    scored = plan(
        "llama-65b",
        reference={"kind": "int8_streamed"},
        train={"method": "full", "rule": "stateless", "residency": "tiered", "layer_major": True},
    )
    assert scored.bandwidth.find("reference streamed").threshold_tokens == pytest.approx(4000, rel=0.05)


def test_without_prefetch_compute_and_transfer_add_up() -> None:
    with_slots = plan("llama-65b", train={"rule": "stateless", "residency": "tiered", "slots": 2})
    without = plan("llama-65b", train={"rule": "stateless", "residency": "tiered", "slots": 1})
    busy = without.bandwidth.link_seconds("train")
    assert without.schedule.train_seconds == pytest.approx(without.work.train_seconds + sum(busy.values()))
    assert with_slots.schedule.train_seconds == pytest.approx(max(with_slots.work.train_seconds, *busy.values()))


def test_one_tenth() -> None:
    """The table that the platform is named after: a trillion parameters on a tenth of the devices."""
    usual, stateless, adapter = (found.plan for found in compare(load_card("dense-1t"), load_hardware("h100-80gb")))
    assert usual is not None
    assert stateless is not None
    assert adapter is not None
    assert all(p.verdict.fits for p in (usual, stateless, adapter))
    assert stateless.schedule.devices <= usual.schedule.devices / 8
    assert adapter.schedule.devices <= usual.schedule.devices / 10
    assert adapter.schedule.devices < stateless.schedule.devices
    assert max(adapter.schedule.device_hours, stateless.schedule.device_hours) < usual.schedule.device_hours / 4


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_plan_file_plans(path: Path) -> None:
    one = make_plan(request_of(read_plan(path)))
    assert one.verdict.fits == ("as-published" not in path.stem)
    assert all(term.bytes > 0 and term.formula and set(term.phases) <= set(PHASES) for term in one.memory.terms)
    assert one.schedule.step_seconds > 0
    assert one.as_tree()["verdict"]["fits"] == one.verdict.fits
