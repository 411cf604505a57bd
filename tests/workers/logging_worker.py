"""A small regression that logs what it measures: of its own parameters now and then, of the outer ones at each sync."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while modules load, of which nothing is garbage

import time

import torch

import atoll

PAUSE_S = 0.02
EVERY = 4


def main() -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    held_out = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (model(x)[:, 0] - x.sum(1)).square().mean()
        return found

    with atoll.join(model, optimizer, data_fingerprint=bytes(32)) as site:
        drawn = torch.Generator().manual_seed(site.seed)
        while True:
            loss = loss_of(torch.randn(16, 8, generator=drawn))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(PAUSE_S)
            done = site.step(tokens=16, loss=loss)
            if not done.running:
                return
            if done.inner_step % EVERY == EVERY - 1:
                site.log({"val_loss": loss_of(held_out).detach()})
            if done.synced and site.has_outer_parameters:
                with site.outer_parameters():
                    site.log({"val_loss": loss_of(held_out).detach()})


if __name__ == "__main__":
    main()
