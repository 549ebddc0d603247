"""GPTQ for NVFP4: rounding errors that cancel in the outputs, for inputs like those of the calibration data.

Columns are rounded one after another. The rounding error of each is compensated in the columns that are not rounded
yet, as far as their inputs correlate with this column's (Frantar et al., arXiv 2210.17323). How much goes where follows
from the inverse of the Hessian H = E[x x^T]: H^-1 = U^T U with U upper triangular. If column k has rounding error e,
e / U_kk * U_kj is subtracted from every later column j, and the loss grows by (e / U_kk)^2.

An NVFP4 block has one scale for 16 columns. Each scale that the recipe ``mse`` would try is tried on all 16 columns,
with errors compensated inside the block, and the one with the least loss is kept. Most of the gain comes from this:
on the demo model, scales chosen beforehand keep only a quarter of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_nvfp4.format import SEARCH_SF_MAX, SF_VEC_SIZE, encode, global_scale_for, pad_k
from moe_nvfp4.quantize.search import round_to_e2m1, scales_of_mse

DAMPING = 0.01  # added to H's diagonal, as a fraction of the diagonal's mean
LAZY = 128  # columns after which one product updates all columns behind them
# Elements that are processed at once: rows times candidates times 16 columns. On a CPU they fit its cache.
_CPU_ELEMENTS = 1 << 20
_CUDA_ELEMENTS = 1 << 28
_FACTORED = 1 << 27  # elements of Hessians that are factored at once, float64: 1 GiB


def quantize_gptq(w: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize n matrices w, floating [n, N, K], each with its Hessian, float32 [n, K, K].

    Returns codes uint8 [n, N, K'/2], sf e4m3 [n, N, K'/16] and global scales fp32 [n]; K' is K padded to a multiple
    of 16. hessian: E[x x^T], or any multiple of it, over the rows x that a matrix is multiplied with; symmetric and
    positive semidefinite. Where it is all zeros, columns count alike and are rounded independently.

    Deterministic on one machine. The factors are computed in float64, the rest in float32. ValueError for other shapes,
    and for NaN and Inf.
    """
    n, N, K = w.shape
    if hessian.shape != (n, K, K):
        raise ValueError(f"hessian must be {[n, K, K]} for w {list(w.shape)}, not {list(hessian.shape)}")
    for name, tensor in (("weights", w), ("sums of the calibration data", hessian)):
        if not tensor.isfinite().all():
            raise ValueError(f"{int((~tensor.isfinite()).sum())} {name} are NaN or Inf: look at the checkpoint, or the "
                             "text")  # fmt: skip
    global_scale = global_scale_for(w.detach().float().abs().amax(dim=(1, 2)), SEARCH_SF_MAX)
    w = pad_k(w.detach().float().reshape(n * N, K)).view(n, N, -1)
    padded = w.shape[-1]
    codes = torch.empty(n, N, padded // 2, dtype=torch.uint8, device=w.device)
    sf = torch.empty(n, N, padded // SF_VEC_SIZE, dtype=torch.uint8, device=w.device)
    if padded > K:
        hessian = torch.nn.functional.pad(hessian, (0, padded - K, 0, padded - K))
    factors = torch.empty_like(hessian)
    step = max(1, _FACTORED // padded**2)
    for a in range(0, n, step):
        factors[a : a + step] = inverse_factor(hessian[a : a + step])
    rows = max(1, (_CUDA_ELEMENTS if w.is_cuda else _CPU_ELEMENTS) // (16 * 9 * n))
    for a in range(0, N, rows):
        codes[:, a : a + rows], sf[:, a : a + rows] = _columns(w[:, a : a + rows], factors, global_scale)
    return codes, sf.view(torch.float8_e4m3fn), global_scale


def inverse_factor(hessian: Tensor) -> Tensor:
    """U, upper triangular, with (H + damping)^-1 = U^T U: float32 [n, K, K]. Columns whose inputs are 0 stand alone."""
    H = hessian.double()
    diagonal = H.diagonal(dim1=1, dim2=2)
    mean = diagonal.mean(dim=1, keepdim=True)
    mean = torch.where(mean > 0, mean, 1.0)
    damping = DAMPING * mean
    # With both axes flipped, H = L L^T. Flipped back, H = R R^T where R, L flipped, is upper triangular; so U = R^-1.
    backwards = H.flip(1, 2)
    for _ in range(4):
        L, failed = torch.linalg.cholesky_ex(backwards + torch.diag_embed(damping.expand_as(diagonal)))
        if not failed.any():
            break
        damping = torch.where(failed[:, None] > 0, 10 * damping, damping)
    else:
        raise ValueError("the sums of the calibration data are not positive semidefinite: its activations are too "
                         "large for sums in float32; try another text")  # fmt: skip
    eye = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device).expand_as(H)
    return torch.linalg.solve_triangular(L, eye, upper=False).flip(1, 2).float()


def _columns(w: Tensor, factor: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """w fp32 [n, N, K], factor U [n, K, K] -> codes uint8 [n, N, K/2], bytes of sf uint8 [n, N, K/16]."""
    K = w.shape[-1]
    left = w.transpose(1, 2).contiguous()  # [n, K, N]: a column of a matrix is contiguous
    codes, scales = torch.empty_like(left), []
    for start in range(0, K, LAZY):
        stop = min(start + LAZY, K)
        errors = torch.empty_like(left[:, start:stop])
        for k in range(start, stop, SF_VEC_SIZE):
            block = slice(k, k + SF_VEC_SIZE)
            sf, codes[:, block], error = _block(left[:, block], factor[:, block, block], global_scale)
            scales.append(sf)
            errors[:, k - start : k - start + SF_VEC_SIZE] = error
            behind = slice(k + SF_VEC_SIZE, stop)
            left[:, behind] -= factor[:, block, behind].transpose(1, 2) @ error
        left[:, stop:] -= factor[:, start:stop, stop:].transpose(1, 2) @ errors
    values = codes.transpose(1, 2).reshape(-1, K)
    ones = torch.ones(len(values), K // SF_VEC_SIZE, device=w.device).to(torch.float8_e4m3fn)
    packed = encode(values, ones, 1.0, check=False)
    return packed.view(*w.shape[:2], K // 2), torch.stack(scales, dim=-1)


def _block(w: Tensor, factor: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """16 columns w [n, 16, N] -> the scales of least loss, bytes [n, N]; values of the codes and errors [n, 16, N]."""
    n, columns, N = w.shape
    tried = scales_of_mse(w.abs().amax(dim=1).flatten(), global_scale.repeat_interleave(N)).view(-1, n, N)
    scale = tried.view(torch.float8_e4m3fn).float() * global_scale[:, None]
    divisor = torch.where(scale > 0, scale, torch.inf)  # with a scale of 0 all codes are 0
    x = w.movedim(1, 0)[:, None].repeat(1, len(tried), 1, 1)  # [16, C, n, N]
    codes, errors = torch.empty_like(x), torch.empty_like(x)
    loss = torch.zeros_like(scale)
    for t in range(columns):
        codes[t] = round_to_e2m1(x[t] / divisor)
        errors[t] = (x[t] - codes[t] * scale) / factor[:, t, t, None]
        loss += errors[t].square()
        x[t + 1 :].addcmul_(errors[t], factor[:, t, t + 1 :].T[:, None, :, None], value=-1)
    best = loss.argmin(dim=0)  # [n, N]
    pick = lambda t: t.gather(1, best.expand(columns, 1, n, N)).squeeze(1).movedim(0, 1)
    return tried.gather(0, best[None])[0], pick(codes), pick(errors)
