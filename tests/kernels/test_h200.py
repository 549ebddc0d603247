"""The emulator beside what an H200 returned for the same inputs: bit for bit, but for the approximations.

`python -m tests.kernels.record_h200` on a machine with the GPU makes data/h200.npz anew; so it must after a change
of the cases, and of the Hopper kernels where that changes what they launch or the order in which they add.
"""

import shutil

import numpy as np
import pytest
import torch

from tests.emulator import EmulatorError
from tests.kernels.hopper_instructions import CASES, GROUPS
from tests.kernels.record_h200 import bits, layer_checksum, load

try:
    import cutlass  # noqa: F401
except ImportError:
    LAYERS = {}
else:
    from tests.kernels.emulator_sm90 import on_emulator
    from tests.kernels.hopper_layers import LAYERS, every_launch, outputs_of

ABOUT, RECORDS = load()
AGAIN = f"recorded with {ABOUT}; if it was changed since, record again: python -m tests.kernels.record_h200"
UNIT = 2.0**-149  # of subnormals
UNTOUCHED = {2: np.int16(-1), 4: np.int32(-1)}  # outputs before a launch


# ---- instructions ----
def same(found, recorded, name):
    if ".f64" in name and found.dtype == np.uint64:  # any NaN may come out
        nan = [np.isnan(x.view(np.float64)) for x in (found, recorded)]
        return ((found == recorded) | (nan[0] & nan[1])).all()
    if "tensor" in name and len(found) == 128 and found.dtype == np.uint8:  # a map: only the driver reads the rest
        return (found[:60] == recorded[:60]).all()
    return np.array_equal(found, recorded)


def logarithm(x, exact):
    return np.where((x > 0.5) & (x < 2), 2**-22.6, 2**-22.6 * np.abs(exact))


def circular(x, exact):
    return np.select([np.abs(x) <= 2 * np.pi, np.abs(x) <= 100 * np.pi], [2**-20.5, 2**-14.7], np.inf)


def relative(bound):
    return lambda x, exact: bound * np.abs(exact)


# The error that PTX ISA allows, and the share of H200 results that equal the emulator's: the exact one, rounded.
APPROXIMATE = {
    "div.full": (np.divide, relative(2**-22), 0.75),
    "div.approx": (np.divide, relative(2**-22), 0.8),
    "rcp.approx": (np.reciprocal, relative(2**-23), 0.9),
    "sqrt.approx": (np.sqrt, relative(2**-23), 0.9),
    "rsqrt.approx": (lambda x: 1 / np.sqrt(x), relative(2**-22.9), 0.85),
    "ex2.approx": (np.exp2, relative(2**-22), 0.75),
    "lg2.approx": (np.log2, logarithm, 0.75),
    "sin.approx": (np.sin, circular, 0.1),
    "cos.approx": (np.cos, circular, 0.4),
    "tanh.approx": (np.tanh, relative(2**-11), 0.6),
}


def wrong_approximation(name, case, found, recorded):
    function, allowed, share = APPROXIMATE[".".join(name.split(".")[:2])]
    value, hopper = found.view(np.float32), recorded.view(np.float32)
    inputs = [x.view(np.float32) for x in case.arguments[1:]]
    if ".ftz" in name:
        inputs = [np.where(np.abs(x) < 2.0**-126, 0 * x, x) for x in inputs]
    inputs = [x.astype(np.float64) for x in inputs]
    exact = function(*inputs)
    bound = allowed(inputs[-1], exact) + UNIT
    special = ~np.isfinite(value) | (value == 0)
    fine = np.where(special, (found == recorded) | (hopper == value), np.abs(hopper - exact) <= bound)
    fine |= bound == np.inf
    if not fine.all():
        at = int(fine.argmin())
        return f"{name}: {hopper[at]} for {[x[at] for x in inputs]}"
    equal = (found == recorded).mean()
    return None if equal >= share else f"{name}: only {equal:.0%} are the emulator's"


def wrong(name, case, schedule):
    checksum, recorded = RECORDS[name]
    if checksum != case.checksum:
        return f"{name}: other inputs"
    if case.refused:
        with pytest.raises(EmulatorError, match=case.refused):
            case.emulated(schedule)
        return None if recorded == [] else f"{name}: the H200 did not refuse it"
    for found, expected in zip(case.emulated(schedule), recorded, strict=True):
        if ".approx" in name or "div.full" in name:
            return wrong_approximation(name, case, found, expected)
        if not same(found, expected, name):
            return f"{name}: {(found != expected).sum()} of {found.size} differ"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["eager", "lazy"])
@pytest.mark.parametrize("group", GROUPS)
@np.errstate(all="ignore")
def test_instructions(group, schedule):
    """Conversions, arithmetic, shuffles, atomics, mma, wgmma, swizzled tiles, the phases of mbarriers, clusters."""
    cases = GROUPS[group]
    found = [wrong(name, case, schedule) for name, case in cases.items() if name in RECORDS]
    assert not any(found), [why for why in found if why] + [AGAIN]
    missing = [name for name in cases if name not in RECORDS]
    if missing:
        pytest.skip(f"not recorded: {', '.join(missing)}")


def test_approximations_are_all_there():
    names = {".".join(name.split(".")[:2]) for name in CASES if ".approx" in name or "div.full" in name}
    assert names == set(APPROXIMATE)


@pytest.mark.slow
# ---- the Hopper backend, launch by launch ----
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    """Every launch gets what the H200's launches before returned, and returns what the H200's returned.

    What the H200 left untouched, unrouted rows, may be anything.
    """
    if shutil.which("cc") is None:
        pytest.skip("the emulator links the compiled host code with cc")
    if name not in RECORDS:
        pytest.skip("not recorded")
    checksum, recorded = RECORDS[name]
    layer, recorded = LAYERS[name], list(recorded)
    assert checksum == layer_checksum(layer), f"other inputs; {AGAIN}"

    def listener(kernel, run, values):
        run()
        for tensor in outputs_of(kernel, values):
            found, expected = bits(tensor), recorded.pop(0) if recorded else None
            assert expected is not None and found.shape == expected.shape, f"{kernel} writes something else; {AGAIN}"
            different = int(((found != expected) & (expected != UNTOUCHED[expected.itemsize])).sum())
            assert not different, f"{kernel}: {different} of {found.size} differ; {AGAIN}"
            tensor.view(torch.from_numpy(found).dtype).copy_(torch.from_numpy(expected.copy()))

    with on_emulator(), every_launch(listener):
        layer.run("cpu")
    assert not recorded, f"fewer launches; {AGAIN}"
