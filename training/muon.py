"""The Muon optimiser: momentum, made orthogonal by Newton-Schulz steps."""

from __future__ import annotations

import torch


class Muon(torch.optim.Optimizer):
    """For matrices, and for stacks of matrices (the last two dimensions). The step is scaled by 0.2 * sqrt(longer
    side), so that AdamW's learning rates carry over."""

    def __init__(self, params, lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            momenta, gradients = [self.state[p]["momentum"] for p in params], [p.grad for p in params]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, gradients)
            updates = torch._foreach_add(gradients, momenta, alpha=group["momentum"])
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            by_shape: dict[tuple, list] = {}
            for p, update in zip(params, updates, strict=True):
                by_shape.setdefault(tuple(p.shape[-2:]), []).append((p, update))
            for shape, pairs in by_shape.items():
                stack = orthogonal(torch.cat([u.reshape(-1, *shape) for _, u in pairs]))
                steps = stack.split([u.numel() // (shape[0] * shape[1]) for _, u in pairs])
                deltas = [s.reshape(p.shape) for s, (p, _) in zip(steps, pairs, strict=True)]
                torch._foreach_add_([p for p, _ in pairs], deltas, alpha=-group["lr"] * 0.2 * max(shape) ** 0.5)


def orthogonal(stack: torch.Tensor) -> torch.Tensor:
    """Each matrix of [N, rows, columns] moved to nearly the nearest orthogonal one (five quintic steps)."""
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.bfloat16() if stack.is_cuda else stack
    if tall:
        x = x.mT.contiguous()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        b = torch.baddbmm(a, a, a, beta=-4.775, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return (x.mT if tall else x).float()
