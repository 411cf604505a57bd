"""While the built-in trainer trains: the loss of the outer parameters on held-out text, a curve of the run."""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

from atoll.node.parallel.passes import Passes
from atoll.node.worker.data import Text
from atoll.node.worker.site import Site, Step
from atoll.protocol.settings import RunSettings

NAME = "held_out_loss"
"""Of a token (a byte, where text is not tokenized), in nats, as the training loss is."""
NUM_BATCHES = 4
"""As large as a rank's of training, so that there is room for them: about one and a third of a step's time."""


class HeldOut:
    """At one site, the first of those that train; all of its ranks take part."""

    def __init__(
        self,
        passes: Passes,
        site: Site,
        text: Text,
        settings: RunSettings,
        *,
        batch_size: int,
        device: torch.device,
        is_first_reader: bool,
    ) -> None:
        """`batch_size`: of a rank. `is_first_reader`: of the ranks that see different batches of training."""
        self._passes, self._site, self._text, self._device = passes, site, text, device
        self._says = is_first_reader
        self._batch_size, self._sequence = batch_size, settings.trainer.sequence
        self._every = settings.trainer.evaluate_every
        self._number = site.commit // max(1, self._every)  # of the last one for which that was decided
        why_not = passes.why_no_loss
        if len(text) <= self._sequence:
            why_not = f"{len(text)} held-out bytes or tokens are fewer than a sequence of {self._sequence} and one more"
        if self._every and why_not:
            self._every = 0
            if site.rank == 0:
                sys.stderr.write(f"atoll: nothing is evaluated while this site is the run's first: {why_not}\n")

    def is_due(self, step: Step) -> bool:
        """Alike at all ranks: the commit decides, and who contributed to it."""
        site = self._site
        if not self._every or not step.synced:
            return False
        number = site.commit // self._every
        is_time = number != self._number or site.run_over  # a commit may have been taken together with the next one
        if not step.running and not site.run_over:
            return False  # a site that leaves keeps nobody waiting, and the next site is the first one
        if site.index == 0 and not site.has_outer_parameters:
            return False
        self._number = number
        return is_time and site.index == 0

    def evaluate(self) -> None:
        """A collective of the site's ranks."""
        site = self._site
        with site.busy("evaluation"), site.outer_parameters():
            losses = [self._passes.loss_of(w[:, :-1], w[:, 1:]) for w in self._batches()]
            if self._says and (found := [loss for loss in losses if loss is not None]):
                site.log({NAME: torch.stack(found).mean()})

    def _batches(self) -> list[Tensor]:
        """The same at each rank and each time, evenly over the text: (batch, sequence + 1)."""
        size = self._sequence + 1
        offsets = np.linspace(0, len(self._text) - size, NUM_BATCHES * self._batch_size, dtype=np.int64)
        windows = torch.from_numpy(np.stack([self._text.window(int(at), size) for at in offsets]))
        return [batch.to(self._device).long() for batch in torch.split(windows, self._batch_size)]
