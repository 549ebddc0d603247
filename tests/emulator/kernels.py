"""Small CuTe DSL kernels for the emulator's tests; layouts and descriptors are CuTe's own."""

import cutlass
import cutlass.utils as utils
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as blockscaled
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float4E2M1FN, Float8E4M3FN, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from moe_nvfp4.kernels.sm100 import ptx as ptx
from tests.emulator.launch import PTX_ONLY


def fake(dtype, *shape, align=16):
    """A compact row-major tensor to compile with; sizes that are None may vary."""
    sizes = tuple(cute.sym_int(divisibility=16) if n is None else n for n in shape)
    strides = [1]
    for n in sizes[:0:-1]:
        strides.insert(0, strides[0] * n)
    return make_fake_tensor(dtype, sizes, tuple(strides), assumed_align=align)


def compile(kernel, *tensors):
    return cute.compile(kernel, *tensors, make_fake_stream(use_tvm_ffi_env_stream=True), options=PTX_ONLY)


class HopperGemm:
    """out[M, N] = a[M, K] · b[N, K]ᵀ in bf16: a warpgroup per 64 x n tile, a ring of TMA loads, wgmma."""

    def __init__(self, n=32, k=64, stages=2):
        self.tile, self.stages = (64, n, k), stages

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream):
        m, n, k = self.tile
        mma = sm90.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (m, n)
        )  # fmt: skip
        a_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, self.tile, BFloat16, self.stages)
        b_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, self.tile, BFloat16, self.stages)
        op = cpasync.CopyBulkTensorTileG2SOp()
        load_a, ma = cpasync.make_tiled_tma_atom(op, a, cute.slice_(a_layout, (None, None, 0)), (m, k))
        load_b, mb = cpasync.make_tiled_tma_atom(op, b, cute.slice_(b_layout, (None, None, 0)), (n, k))
        grid = (out.shape[0] // m, out.shape[1] // n, 1)
        self.kernel(mma, a_layout, b_layout, load_a, ma, load_b, mb, out).launch(
            grid=grid, block=[128, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, a_layout: cute.ComposedLayout, b_layout: cute.ComposedLayout,
               load_a: cute.CopyAtom, ma: cute.Tensor, load_b: cute.CopyAtom, mb: cute.Tensor,
               out: cute.Tensor):  # fmt: skip
        m, n, k = self.tile
        tid, _, _ = cute.arch.thread_idx()
        mt, nt, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)

        smem = utils.SmemAllocator()
        bars = smem.allocate_array(Int64, 2 * self.stages)
        sa = smem.allocate_tensor(BFloat16, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)
        sb = smem.allocate_tensor(BFloat16, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
        full, empty = bars, bars + self.stages
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        ga = cute.local_tile(ma, (m, k), (mt, None))
        gb = cute.local_tile(mb, (n, k), (nt, None))
        one = cute.make_layout(1)
        tas, tag = cpasync.tma_partition(load_a, 0, one, cute.group_modes(sa, 0, 2), cute.group_modes(ga, 0, 2))
        tbs, tbg = cpasync.tma_partition(load_b, 0, one, cute.group_modes(sb, 0, 2), cute.group_modes(gb, 0, 2))
        thread = mma.get_slice(tid)
        ra, rb = mma.make_fragment_A(thread.partition_A(sa)), mma.make_fragment_B(thread.partition_B(sb))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((m, n)), Float32)
        acc.fill(0.0)
        mma.set(warpgroup.Field.ACCUMULATE, True)

        steps = ma.shape[1] // k
        for step in cutlass.range(steps + self.stages - 1, unroll=1):  # loads run ahead of the products
            if step < steps:
                stage, parity = step % self.stages, (step // self.stages) & 1
                if warp == 0:
                    cute.arch.mbarrier_wait(empty + stage, parity ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * (m + n) * k)
                    cute.copy(load_a, tag[None, step], tas[None, stage], tma_bar_ptr=full + stage)
                    cute.copy(load_b, tbg[None, step], tbs[None, stage], tma_bar_ptr=full + stage)
            if step >= self.stages - 1:
                done = step - (self.stages - 1)
                stage, parity = done % self.stages, (done // self.stages) & 1
                cute.arch.mbarrier_wait(full + stage, parity)
                warpgroup.fence()
                cute.gemm(mma, acc, ra[None, None, None, stage], rb[None, None, None, stage], acc)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                if tid % 32 == 0:
                    cute.arch.mbarrier_arrive(empty + stage)

        tile = thread.partition_C(cute.local_tile(out, (m, n), (mt, nt)))
        cute.autovec_copy(acc, tile)


class BlackwellGemm:
    """out[M, N] = (a · sfa)[M, K] · (b · sfb)[N, K]ᵀ in NVFP4: a CTA per 128 x n tile, in steps of 256 of K."""

    def __init__(self, n):
        self.n = n
        self.group = tcgen05.CtaGroup.ONE

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, sfa: cute.Tensor, sfb: cute.Tensor, out: cute.Tensor, stream):
        """a, b: [rows, K / 2] bytes; sfa, sfb: bytes of the 128x4 layout; K a multiple of 256."""
        tile = self.tile = (128, self.n, 256)
        mma = cute.make_tiled_mma(
            tcgen05.MmaMXF4NVF4Op(Float8E4M3FN, (128, self.n, 64), self.group, tcgen05.OperandSource.SMEM)
        )  # fmt: skip
        codes = lambda t: cute.make_tensor(
            cute.recast_ptr(t.iterator, dtype=Float4E2M1FN),
            cute.make_layout((t.shape[0], 2 * t.shape[1], 1), stride=(2 * t.shape[1], 1, 0)),
        )  # fmt: skip
        ta, tb = codes(a), codes(b)
        scales = lambda t, of: cute.make_tensor(
            cute.recast_ptr(t.iterator, dtype=Float8E4M3FN), blockscaled.tile_atom_to_shape_SF(of.shape, 16)
        )  # fmt: skip
        layouts = (
            sm100.make_smem_layout_a(mma, tile, Float4E2M1FN, 1),
            sm100.make_smem_layout_b(mma, tile, Float4E2M1FN, 1),
            blockscaled.make_smem_layout_sfa(mma, tile, 16, 1),
            blockscaled.make_smem_layout_sfb(mma, tile, 16, 1),
        )
        op, cluster = cpasync.CopyBulkTensorTileG2SOp(self.group), (1, 1, 1, 1)
        first = lambda layout: cute.slice_(layout, (None, None, None, 0))
        make_a, make_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        load_a, ma = make_a(op, ta, first(layouts[0]), tile, mma, cluster)
        load_b, mb = make_b(op, tb, first(layouts[1]), tile, mma, cluster)
        load_sfa, msfa = make_a(op, scales(sfa, ta), first(layouts[2]), tile, mma, cluster, internal_type=cutlass.Int16)
        load_sfb, msfb = make_b(op, scales(sfb, tb), first(layouts[3]), tile, mma, cluster, internal_type=cutlass.Int16)
        self.bytes = sum(
            cute.size_in_bytes(dtype, first(layout))
            for dtype, layout in zip((Float4E2M1FN, Float4E2M1FN, Float8E4M3FN, Float8E4M3FN), layouts, strict=True)
        )
        grid = (out.shape[0] // 128, out.shape[1] // self.n, 1)
        self.kernel(mma, load_a, ma, load_b, mb, load_sfa, msfa, load_sfb, msfb, out, *layouts).launch(
            grid=grid, block=[128, 1, 1], stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, load_a: cute.CopyAtom, ma: cute.Tensor, load_b: cute.CopyAtom, mb: cute.Tensor,
               load_sfa: cute.CopyAtom, msfa: cute.Tensor, load_sfb: cute.CopyAtom, msfb: cute.Tensor, out: cute.Tensor,
               a_layout: cute.ComposedLayout, b_layout: cute.ComposedLayout, sfa_layout: cute.Layout,
               sfb_layout: cute.Layout):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        mt, nt, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        smem = utils.SmemAllocator()
        full = smem.allocate_array(Int64, 1)
        done = smem.allocate_array(Int64, 1)
        address = smem.allocate_array(Int32, 1)
        sa = smem.allocate_tensor(Float4E2M1FN, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)
        sb = smem.allocate_tensor(Float4E2M1FN, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
        ssfa = smem.allocate_tensor(Float8E4M3FN, sfa_layout, byte_alignment=128)
        ssfb = smem.allocate_tensor(Float8E4M3FN, sfb_layout, byte_alignment=128)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(full, 1)
                cute.arch.mbarrier_init(done, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(512, address)
        cute.arch.sync_threads()
        base = cute.arch.retrieve_tmem_ptr(Float32, 16, address)

        thread = mma.get_slice(0)

        def global_tiles(tensor, tiler, partition):
            return partition(cute.local_tile(tensor, tiler, (None, None, None)))

        rows, columns = (self.tile[0], self.tile[2]), (self.tile[1], self.tile[2])
        one, three = cute.make_layout(1), lambda t: cute.group_modes(t, 0, 3)
        pick = lambda t, at: t[None, at, None, 0]
        ta_s, ta_g = cpasync.tma_partition(load_a, 0, one, three(sa), three(global_tiles(ma, rows, thread.partition_A)))
        tb_s, tb_g = cpasync.tma_partition(
            load_b, 0, one, three(sb), three(global_tiles(mb, columns, thread.partition_B))
        )
        fa_s, fa_g = cpasync.tma_partition(
            load_sfa, 0, one, three(ssfa), three(global_tiles(msfa, rows, thread.partition_A))
        )
        fb_s, fb_g = cpasync.tma_partition(
            load_sfb, 0, one, three(ssfb), three(global_tiles(msfb, columns, thread.partition_B))
        )
        ta_g, tb_g = pick(ta_g, mt), pick(tb_g, nt)
        fa_s, fb_s = cute.filter_zeros(fa_s), cute.filter_zeros(fb_s)
        fa_g, fb_g = pick(cute.filter_zeros(fa_g), mt), pick(cute.filter_zeros(fb_g), nt)

        ra, rb = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        acc = cute.make_tensor(base, mma.make_fragment_C(mma.partition_shape_C(self.tile[:2])).layout)
        first = lambda layout: cute.slice_(layout, (None, None, None, 0))
        after = base + tcgen05.find_tmem_tensor_col_offset(acc)
        tsfa = cute.make_tensor(
            cute.recast_ptr(after, dtype=Float8E4M3FN),
            blockscaled.make_tmem_layout_sfa(mma, self.tile, 16, first(sfa_layout)),
        )  # fmt: skip
        after = after + tcgen05.find_tmem_tensor_col_offset(tsfa)
        tsfb = cute.make_tensor(
            cute.recast_ptr(after, dtype=Float8E4M3FN),
            blockscaled.make_tmem_layout_sfb(mma, self.tile, 16, first(sfb_layout)),
        )  # fmt: skip
        to_tmem = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(self.group), Float8E4M3FN)

        if warp == 0:
            copy_a = tcgen05.make_s2t_copy(to_tmem, cute.filter_zeros(tsfa))
            copy_b = tcgen05.make_s2t_copy(to_tmem, cute.filter_zeros(tsfb))
            slice_a, slice_b = copy_a.get_slice(0), copy_b.get_slice(0)
            from_a = tcgen05.get_s2t_smem_desc_tensor(copy_a, slice_a.partition_S(cute.filter_zeros(ssfa)))
            from_b = tcgen05.get_s2t_smem_desc_tensor(copy_b, slice_b.partition_S(cute.filter_zeros(ssfb)))
            into_a, into_b = slice_a.partition_D(cute.filter_zeros(tsfa)), slice_b.partition_D(cute.filter_zeros(tsfb))
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for k in cutlass.range(ma.shape[1] // 256, unroll=1):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes)
                cute.copy(load_a, ta_g[None, k], ta_s[None, 0], tma_bar_ptr=full)
                cute.copy(load_b, tb_g[None, k], tb_s[None, 0], tma_bar_ptr=full)
                cute.copy(load_sfa, fa_g[None, k], fa_s[None, 0], tma_bar_ptr=full)
                cute.copy(load_sfb, fb_g[None, k], fb_s[None, 0], tma_bar_ptr=full)
                cute.arch.mbarrier_wait(full, k & 1)
                cute.copy(copy_a, from_a[None, None, None, None, 0], into_a)
                cute.copy(copy_b, from_b[None, None, None, None, 0], into_b)
                for step in cutlass.range_constexpr(4):
                    mma.set(tcgen05.Field.SFA, tsfa[None, None, step].iterator)
                    mma.set(tcgen05.Field.SFB, tsfb[None, None, step].iterator)
                    cute.gemm(mma, acc, ra[None, None, step, 0], rb[None, None, step, 0], acc)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                with cute.arch.elect_one():
                    tcgen05.commit(done)
                cute.arch.mbarrier_wait(done, k & 1)
        cute.arch.sync_threads()
        ptx.tmem_fence(before=False)

        load = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32, tcgen05.Pack.NONE), Float32), acc
        )  # fmt: skip
        mine = load.get_slice(tid)
        tile = mine.partition_D(thread.partition_C(cute.local_tile(out, self.tile[:2], (mt, nt))))
        registers = cute.make_rmem_tensor(tile.shape, Float32)
        cute.copy(load, mine.partition_S(acc), registers)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(registers, tile)
        ptx.tmem_fence(before=True)
        cute.arch.sync_threads()
        if warp == 0:
            ptx.tmem_fence(before=False)
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(base, 512)


class TileCopy:
    """Loads the first 8 x columns tile of a [24, 512] matrix with a row pitch of 1024: only its tensor map matters."""

    def __init__(self, dtype, columns, swizzle_bits):
        self.dtype, self.columns, self.swizzle_bits = dtype, columns, swizzle_bits

    @cute.jit
    def __call__(self, x: cute.Tensor, stream):
        matrix = cute.make_tensor(
            cute.recast_ptr(x.iterator, dtype=self.dtype), cute.make_layout((24, 512), stride=(1024, 1))
        )  # fmt: skip
        rows = cute.make_layout((8, self.columns), stride=(self.columns, 1))
        layout = cute.make_composed_layout(cute.make_swizzle(self.swizzle_bits, 4, 3), 0, rows)
        op = cpasync.CopyBulkTensorTileG2SOp()
        load, tensor = cpasync.make_tiled_tma_atom(op, matrix, layout, (8, self.columns))
        self.kernel(load, tensor, layout).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, load: cute.CopyAtom, tensor: cute.Tensor, layout: cute.ComposedLayout):
        smem = utils.SmemAllocator()
        bar = smem.allocate_array(Int64, 1)
        tile = smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        source = cute.local_tile(tensor, (8, self.columns), (0, 0))
        one, flat = cute.make_layout(1), lambda t: cute.group_modes(t, 0, 2)
        to, at = cpasync.tma_partition(load, 0, one, flat(tile), flat(source))
        cute.copy(load, at, to, tma_bar_ptr=bar)


def tile_copy(dtype, columns, swizzle_bits):
    return compile(TileCopy(dtype, columns, swizzle_bits), fake(Uint8, None, align=128))


def hopper_gemm(n, k, stages):
    tensors = fake(BFloat16, None, None), fake(BFloat16, None, None), fake(Float32, None, None)
    return compile(HopperGemm(n, k, stages), *tensors)


def blackwell_gemm(n):
    operands = fake(Uint8, None, None, align=32), fake(Uint8, None, None, align=32)
    scales = fake(Uint8, None, align=128), fake(Uint8, None, align=128)
    return compile(BlackwellGemm(n), *operands, *scales, fake(Float32, None, None))
