"""Kernels as PTX text for the emulator's tests: what one line does is visible, and a line can be left out."""

from tests.emulator import emulate

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
ALL = ("eager", "lazy", "reverse-lazy", "random:1", "random:2", "slow:1", "slow:2")
MISTAKES = ("lazy", "reverse-lazy", "random:1")
BAR, DATA = 1024, 2048  # the kernels here keep their mbarriers in the first KiB of dynamic shared memory
assert DATA % 1024 == 0


def kernel(body, parameters=()):
    """A kernel whose statements are `body`; %t is the thread's number, %p1 whether that is 0."""
    declared = ",\n".join(f".param {p}" for p in (".u64 out", *parameters))
    return f"""{HEAD}
.visible .entry test({declared})
{{
    .reg .pred %p<16>;
    .reg .b16 %h<16>;
    .reg .b32 %r<300>;
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
{body}
    ret;
}}
"""


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
    """`words` 32-bit words from shared memory to out, by the first warp."""
    return "".join(
        f"mad.lo.u32 %r1, %t, 4, {source}; ld.shared.b32 %r2, [%r1+{128 * i}];"
        f"mad.wide.u32 %x1, %t, 4, %out; st.global.b32 [%x1+{128 * i}], %r2;\n"
        for i in range(words // 32)
    )


def place_of(address, span):
    """The swizzling figures of the PTX ISA: 16-byte piece c of 128-byte line l moves to c ^ (l mod span/16)."""
    if span == 0:
        return address
    line, piece, byte = address // 128, address // 16 % 8, address % 16
    return line * 128 + (piece ^ line % (span // 16)) * 16 + byte
