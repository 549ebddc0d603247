"""The Blackwell kernels: compiled without a GPU and looked at, then run on the emulator and compared with the reference.

Every comparison has a bound that is derived, not tuned: a GEMM's fp32 sum may be off the float64 one by
K * 2^-24 of the sum of magnitudes, the gate by a few units of its last place, a stored bf16 by half a unit. Codes and
block scales must be what some value within those bounds is quantized to.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")  # before anything imports cutlass: there is no GPU to ask

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_nvfp4 import Gate, NVFP4Experts, reference
from moe_nvfp4 import format as nvfp4
from moe_nvfp4.kernels import sm100
from moe_nvfp4.routing import Rows, group_by_expert

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from moe_nvfp4.kernels.sm100_gemm import SMEM, TMEM, GemmConfig, Tile  # noqa: E402
from moe_nvfp4.kernels.sm100_rows import CombineConfig, QuantizeConfig  # noqa: E402

GATES = {
    "silu": Gate(),
    "oai": Gate("silu", alpha=1.702, limit=1.5, up_offset=1.0),
    "after": Gate("silu", limit=0.5, clamp_after=True),
    "gelu": Gate("gelu_tanh"),
    "relu2": Gate("relu2", gated=False),
    "raw": Gate("raw"),
    "raw up": Gate("raw", gated=False),
}
TILES = [Tile(tokens, blocks) for tokens in (64, 128, 256) for blocks in (1, 2) if Tile(tokens, blocks).legal]


# ---- without a kernel ----------------------------------------------------------------------------


@pytest.mark.parametrize("E, rows, K16, projections", [(1, 16, 1, 1), (3, 144, 5, 2), (2, 128, 8, 2), (2, 300, 44, 1)])
def test_pack_sf_is_lossless(E, rows, K16, projections):
    sf = torch.randint(0, 256, (E, projections * rows, K16), dtype=torch.uint8)
    packed = sm100.pack_sf(sf, projections)
    assert packed.shape == (E * projections * (-(-rows // 128) * 128) * (-(-K16 // 4) * 4),)
    assert torch.equal(sm100.unpack_sf(packed, E, projections, rows, K16), sf)


def test_pack_sf_is_where_the_kernel_looks():
    E, rows, K16 = 2, 200, 6
    sf = torch.randint(0, 256, (E, 2 * rows, K16), dtype=torch.uint8)
    packed = sm100.pack_sf(sf, 2)
    for e, projection, row, k in [(0, 0, 0, 0), (1, 1, 199, 5), (1, 0, 130, 3), (0, 1, 40, 4)]:
        tile = ((e * 2 + projection) * 2 + row // 128) * 2 + k // 4
        at = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + k % 4
        assert packed[at] == sf[e, projection * rows + row, k]


def test_weights_are_packed_once_and_again_when_they_change():
    codes = torch.zeros(1, 32, 16, dtype=torch.uint8)
    sf = torch.ones(1, 32, 2, dtype=torch.uint8)
    first = sm100.pack_weights(codes, sf, 1)
    assert first[0] is codes
    assert sm100.pack_weights(codes, sf, 1)[1] is first[1]
    sf[0, 0, 0] = 7
    assert sm100.pack_weights(codes, sf, 1)[1][0] == 7
    odd, _ = sm100.pack_weights(torch.ones(1, 16, 8, dtype=torch.uint8), torch.ones(1, 16, 1, dtype=torch.uint8), 1)
    assert odd.shape == (1, 16, 16) and odd[..., 8:].eq(0).all()


def test_tiles():
    assert set(TILES) == {Tile(64, 1), Tile(64, 2), Tile(128, 1), Tile(128, 2), Tile(256, 1)}
    for t in TILES:
        assert t.second + t.blocks * t.tokens + t.sf_columns <= TMEM  # both accumulators and the scales
    for R, E, rows, projections, sms, tile in [
        (1, 8, 768, 2, 148, Tile(64, 2)),
        (8 * 64, 8, 768, 2, 148, Tile(64, 2)),
        (8 * 65, 8, 768, 2, 148, Tile(128, 2)),
        (8, 128, 2048, 1, 148, Tile(64, 1)),
        (512, 128, 2048, 1, 148, Tile(64, 2)),
        (65536, 128, 2048, 1, 148, Tile(128, 2)),
        (256, 2, 512, 1, 148, Tile(128, 1)),
    ]:
        assert sm100.choose_tile(R, E, rows, projections, sms) == tile


def test_refusals():
    assert [sm100.architecture(c) for c in ((10, 0), (10, 3))] == ["sm_100a", "sm_103a"]
    with pytest.raises(NotImplementedError, match="12.0.*MOE_NVFP4_BACKEND=reference"):
        sm100.architecture((12, 0))
    layer = NVFP4Experts(2, 32, 32)
    groups = group_by_expert(torch.tensor([[0], [1]]), 2)
    with pytest.raises(NotImplementedError, match="activations='nvfp4'"):
        sm100.gemm1_swiglu(Rows(torch.zeros(2, 32)), layer.weights, groups, torch.bfloat16)
    with pytest.raises(NotImplementedError, match="multiples of 16, got 40"):
        sm100.quantize_rows(torch.zeros(2, 40), None, None, groups)


# ---- compiled, for a GPU that is not here --------------------------------------------------------


def shipped_configs() -> list:
    """What a layer of Qwen3-30B-A3B, one of gpt-oss and small ones with every tile and output compile."""
    silu, oai = Gate(), Gate("silu", alpha=1.702, limit=7.0, up_offset=1.0)
    configs = [
        QuantizeConfig(128, 2048, "bfloat16", True, True),
        QuantizeConfig(128, 768, "bfloat16", False, False),
        CombineConfig(8, 2048, "float32", "bfloat16"),
        GemmConfig(32, 2880, 2880, 2, "bfloat16", oai, "bfloat16", Tile(64, 2)),
        GemmConfig(512, 704, 2048, 1, "nvfp4", Gate("relu2", gated=False), None, Tile(128, 2)),
        GemmConfig(8, 704, 2048, 2, "float16", Gate("raw"), None, Tile(128, 2)),
    ]
    for tile in TILES:
        if tile.blocks == 2:
            configs.append(GemmConfig(128, 768, 2048, 2, "nvfp4", silu, None, tile))
        configs.append(GemmConfig(128, 2048, 768, 1, "assignments", None, None, tile))
    return configs


def inspect_all(folder: str) -> None:
    """In a process of its own, for one architecture: compile, disassemble, print a JSON list."""
    import nvidia.cu13

    tools = Path(next(iter(nvidia.cu13.__path__)), "bin")
    table = []
    for config in shipped_configs():
        for old in Path(folder).iterdir():
            old.unlink()
        sm100.compile_kernel(config, "--enable-tvm-ffi")
        (cubin,) = Path(folder).glob("*.cubin")
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True)
        sass = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
        numbers = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout + usage.stderr)}
        opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9.]*)", sass, re.M)
        count = lambda name: sum(o.startswith(name) for o in opcodes)
        # the block-scaled NVFP4 MMA: UTCOMMA.4X on sm_100, UTCOMMA.BLOCK16 on sm_103
    names = ("UTCOMMA", "UTCCP", "UTMALDG", "UBLKCP", "LDTM", "LDL", "STL")
        table.append({**numbers, "instructions": len(opcodes), **{name: count(name) for name in names}})
    print(json.dumps(table))


@pytest.mark.parametrize("architecture", ["sm_100a", "sm_103a"])
def test_compiles_without_a_gpu(architecture, tmp_path, capsys):
    pytest.importorskip("nvidia.cu13", reason="nvdisasm and cuobjdump are not installed")
    environment = {
        **os.environ, "CUTE_DSL_ARCH": architecture, "CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_DUMP_DIR": str(tmp_path),
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
    }  # fmt: skip
    code = f"from tests import test_kernels_sm100 as t; t.inspect_all({str(tmp_path)!r})"
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = []
    for config, found in zip(shipped_configs(), json.loads(done.stdout.splitlines()[-1]), strict=True):
        line = f"{found['REG']:4} registers {found['instructions']:5} instructions"
        assert found["STACK"] == found["LOCAL"] == found["LDL"] == found["STL"] == 0
        if isinstance(config, GemmConfig):
            t = config.tile
            shared = config.stages * t.stage_bytes + config.fixed_bytes
            assert shared <= SMEM
            assert found["REG"] <= 128
            assert found["UTCOMMA"] == 4 * t.blocks and found["UTCCP"] == 4 * (t.blocks + t.sf_atoms)
            assert found["UTMALDG"] == t.blocks + 4 and found["LDTM"] == t.blocks
            line += f" {config.stages} stages {shared:6} B shared {t.second + t.blocks * t.tokens:3} + "
            line += f"{t.sf_columns} TMEM columns  {t.tokens} x {t.blocks} {config.out}"
        else:
            line += f" {type(config).__name__}"
        lines.append(line)
    with capsys.disabled():
        print(f"\n{architecture}", *lines, sep="\n")

