"""Statistics: pure functions from tensors to numbers, each with its formula, unit and source.

What attention did comes as numbers per query and per key (`streaming.Summary`), so that no map has to be whole.

Shapes: B batch, T queries (tokens), S keys, H heads, E head width, D model width, G gate width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def first_token_share(first_HT: Tensor, *, include_first_query: bool = False) -> Tensor:
    """Mean over queries of A[t, 0], (H,); a share in [0, 1]. "F-Attn" of arXiv:2505.06708.

    The paper does not say whether query 0 counts. Under causal masks that query can look nowhere else, so it is left out unless
    `include_first_query`. Weights are those before any gate. NaN where no query is left.
    """
    return first_HT[..., 0 if include_first_query else 1 :].mean(-1)


def sink_share(first_HT: Tensor, *, tokens: int = 64) -> Tensor:
    """alpha = mean of A[t, 0] over the first `tokens` queries, query 0 among them, (H,); in [0, 1]. arXiv:2410.10781, k = 1.

    A head is a sink on this sequence if alpha > eps; the sink rate is the share of sequences, layers and heads that are. alpha
    falls with `tokens`, so rates of different lengths do not compare (the paper: 64 tokens, eps = 0.3). NaN for a shorter
    sequence.
    """
    if first_HT.shape[-1] < tokens:
        return first_HT.new_full(first_HT.shape[:-1], torch.nan)
    return first_HT[..., :tokens].mean(-1)


def strongest_key(received_HS: Tensor, queries_S: Tensor, *, least: int = 1) -> tuple[Tensor, Tensor]:
    """(share (H,), position (H,)) of the key with the largest mean weight over the queries that could see it.

    received_HS / queries_S, its maximum over keys that at least `least` queries could see. (0, -1) if there are none.
    """
    share_HS = (received_HS / queries_S.clamp(min=1)).masked_fill(queries_S < max(least, 1), -1.0)
    if share_HS.shape[-1] == 0:
        return received_HS.new_zeros(received_HS.shape[:-1]), torch.full(received_HS.shape[:-1], -1)
    share_H, position_H = share_HS.max(-1)
    return share_H.clamp(min=0), torch.where(share_H < 0, -1, position_H)


def normalised_entropy(entropy_HT: Tensor, visible_HT: Tensor) -> Tensor:
    """Mean over queries that see n >= 2 keys of -sum_s A ln A / ln n, (H,); 0 on one key, 1 uniform. NaN without such queries."""
    counts_HT = visible_HT >= 2
    normal_HT = entropy_HT / visible_HT.clamp(min=2).log()
    return (normal_HT * counts_HT).sum(-1) / torch.where(counts_HT.any(-1), counts_HT.sum(-1), torch.nan)


def gram(x_THE: Tensor) -> Tensor:
    """X^T X of every head's output over tokens, (H, E, E), in float64; grams of parts of the tokens add up."""
    x_HTE = x_THE.transpose(0, 1).double()
    return x_HTE.transpose(1, 2) @ x_HTE


def effective_rank(gram_HEE: Tensor) -> Tensor:
    """exp(-sum p ln p) of p = sigma / sum sigma, sigma the singular values of X (uncentred), (H,); 1 to E. Roy and Vetterli 2007.

    From X^T X (`gram`), whose eigenvalues are sigma^2. 0 for an output that is 0. Participation ratio and stable rank differ.
    """
    sigma_HE = torch.linalg.eigvalsh(gram_HEE).clamp(min=0).sqrt()
    total_H1 = sigma_HE.sum(-1, keepdim=True)
    rank_H = torch.special.entr(sigma_HE / total_H1.clamp(min=torch.finfo(torch.float64).tiny)).sum(-1).exp()
    return torch.where(total_H1[..., 0] > 0, rank_H, 0.0)


def head_norms(x_THE: Tensor) -> Tensor:
    """Mean over tokens of |x_h|_2, (H,), in the units of x: of g * (A v), what a head hands to the out projection."""
    return x_THE.float().norm(dim=-1).mean(0)


def max_abs(x: Tensor) -> float:
    """max |x|, in the units of x ("M-Act" of arXiv:2505.06708 is its mean over layers, x the residual stream after each)."""
    return float(x.abs().max()) if x.numel() else 0.0


def massive(x_TD: Tensor, *, floor: float = 100.0, times: float = 1000.0) -> int:
    """How many values have |x| > `floor` and |x| >= `times` the median |x|; arXiv:2402.17762."""
    size_TD = x_TD.abs().float()
    limit = max(floor, times * float(size_TD.median()))
    return int(((size_TD > floor) & (size_TD >= limit)).sum())


def kurtosis(x_TD: Tensor) -> float:
    """mean((x - mu)^4) / (std^4 + 1e-6) over all values of one sequence, std unbiased; not excess: 3 for a Gaussian.

    As in the code of arXiv:2306.12929, which averages it over sequences and tensors.
    """
    x = x_TD.flatten().double()
    return float((x - x.mean()).pow(4).mean() / (x.std().pow(4) + 1e-6))


def token_norm_ratio(x_TD: Tensor) -> tuple[float, int]:
    """(largest |x_t|_2 / median of |x_t|_2 over tokens, its position)."""
    norm_T = x_TD.float().norm(dim=-1)
    return float(norm_T.max() / norm_T.median().clamp(min=torch.finfo(torch.float32).tiny)), int(norm_T.argmax())


def share_below(gate: Tensor, threshold: float) -> float:
    """Share of gate values strictly below the threshold (arXiv:2505.06708 reports 0.1), in [0, 1]."""
    return float((gate < threshold).double().mean())


def token_entropy(total: Tensor, total_log: Tensor, tokens: int) -> Tensor:
    """How evenly a gate is open over n tokens: -sum_t p ln p / ln n of p_t = g_t / sum g; 0 at one token, 1 even.

    From sum g and sum g ln g (g >= 0), which add up over batches. NaN for n < 2 or a gate that is shut everywhere.
    """
    if tokens < 2:
        return torch.full_like(total, torch.nan)
    entropy = total.log() - total_log / total
    return torch.where(total > 0, entropy / torch.tensor(float(tokens)).log(), torch.nan)


def histogram(values: Tensor, bins: int, low: float, high: float) -> tuple[int, ...]:
    """Counts in `bins` equal bins over [low, high]; the first also counts what lies below, the last what lies above."""
    index = ((values.double() - low) * (bins / (high - low))).floor().clamp(0, bins - 1).long()
    return tuple(torch.bincount(index.flatten(), minlength=bins).tolist())
