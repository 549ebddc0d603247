"""Kernels as PTX text for the emulator's tests: the effect of one line is visible, and a line can be left out."""

import struct

import numpy as np

from tests.emulator import emulate

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
ALL = ("eager", "lazy", "reverse-lazy", "random:1", "random:2", "slow:1", "slow:2")
MISTAKES = ("lazy", "reverse-lazy", "random:1")
BAR, DATA = 1024, 2048  # the kernels here keep their mbarriers in the first KiB of dynamic shared memory
assert DATA % 1024 == 0


def entry(parameters, body):
    """A kernel of the declarations and statements `body`, besides those of %p and %h."""
    declared = ",\n".join(f".param {p}" for p in parameters)
    return f"""{HEAD}
.visible .entry test({declared})
{{
    .reg .pred %p<16>;
    .reg .b16 %h<16>;
{body}
    ret;
}}
"""


def kernel(body, parameters=()):
    """A kernel with the statements `body`; %t is the thread's number, %p1 whether that is 0."""
    return entry(
        (".u64 out", *parameters),
        f"""    .reg .b32 %r<300>;
    .reg .b64 %x<64>;
    .reg .b32 %t;
    .reg .b32 %bar;
    .reg .b32 %data;
    .reg .b64 %out;
    mov.u32 %t, %tid.x;
    mov.b32 %bar, smem;
    add.u32 %data, %bar, {DATA - BAR};
    ld.param.u64 %out, [out];
    setp.eq.u32 %p1, %t, 0;
{body}""",
    )


def run(body, out, arguments=(), parameters=(), threads=32, schedule="eager", cluster=1, **options):
    ptx, size = kernel(body, parameters), (cluster, 1, 1)
    emulate(ptx, [out, *arguments], cluster, threads, 65536, size, schedule=schedule, **options)
    return out


def without(text, part, by=""):
    assert part in text
    return text.replace(part, by)


FENCE = "fence.mbarrier_init.release.cluster; "


def initialise(count=1, bars=1):
    return (
        "".join(f"@%p1 mbarrier.init.shared.b64 [%bar+{8 * i}], {count};\n" for i in range(bars))
        + FENCE
        + "bar.sync 0;\n"
    )


def wait(bar=0, parity=0):
    label = f"WAIT{bar}_{parity}"
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p2, [%bar+{8 * bar}], {parity};\n@!%p2 bra {label};\n"


def dump(words, source="%data"):
    """Copy `words` 32-bit words from shared memory to out, by the first warp."""
    return "".join(
        f"mad.lo.u32 %r1, %t, 4, {source}; ld.shared.b32 %r2, [%r1+{128 * i}];"
        f"mad.wide.u32 %x1, %t, 4, %out; st.global.b32 [%x1+{128 * i}], %r2;\n"
        for i in range(words // 32)
    )


def place_of(address, span):
    """As the PTX ISA's figures of swizzling show: 16-byte piece c of 128-byte line l moves to c ^ (l mod span/16)."""
    if span == 0:
        return address
    line, piece, byte = address // 128, address // 16 % 8, address % 16
    return line * 128 + (piece ^ line % (span // 16)) * 16 + byte


def laid_out(matrix, span):
    """The bytes of a K-major matrix: rows of `span` bytes in lines of 128, swizzled; without swizzling, 32 bytes a
    row."""
    raw = matrix.view(np.uint8).reshape(len(matrix), -1)
    if not span:  # 8 rows of 16 bytes are contiguous; the second piece of each row follows after all of the first
        return np.concatenate([raw[:, :16].ravel(), raw[:, 16:].ravel()])
    memory = np.zeros(len(matrix) * span, np.uint8)
    row, byte = np.indices(raw.shape)
    memory[place_of(row * span + byte, span)] = raw
    return memory


def fill(size, to=0):
    """Bulk-copy `size` bytes from parameter `in` to data + to."""
    return (
        initialise() + f"@%p1 mbarrier.arrive.expect_tx.shared.b64 %x1, [%bar], {size}; ld.param.u64 %x2, [in];"
        f" mov.b32 %r7, {size}; add.u32 %r8, %data, {to};"
        " @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r8], [%x2], %r7, [%bar];\n" + wait()
    )  # fmt: skip


def tensor_map(address, bits_code, dims, strides, box, swizzle, flags=0x40002):
    """The map's bytes. Strides are in bytes, of dimensions 1 and up; swizzle 0 to 3 means 0, 32, 64, 128 bytes."""
    raw = bytearray(128)
    struct.pack_into("<QI", raw, 0, address, flags | (len(dims) - 1) << 4 | bits_code << 7 | swizzle << 13)
    struct.pack_into(f"<{len(strides)}I", raw, 12, *(s // 16 for s in strides))
    struct.pack_into(f"<{len(dims)}I", raw, 32, *(d - 1 for d in dims))
    raw[55 : 55 + len(box)] = bytes(b - 1 for b in box)
    return bytes(raw)
