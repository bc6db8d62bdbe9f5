"""Two optimizers that step once each on every batch, as a GAN's do.

Arguments: epochs, and seconds that a batch takes.
"""

import sys
import time

import torch
from torch import nn

import psworker
from tests.fault.epochs_training import SAMPLE_COUNT, data, digest, say


def train() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    epochs, pace_s = int(sys.argv[1]), float(sys.argv[2])
    maker: nn.Module = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 6))
    critic: nn.Module = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    maker_optimizer: torch.optim.Optimizer = torch.optim.Adam(maker.parameters())
    critic_optimizer: torch.optim.Optimizer = torch.optim.Adam(critic.parameters())
    with psworker.connect(
        connect_timeout_s=60.0, step_timeout_s=60.0, start_timeout_s=90.0
    ) as ps:
        maker, critic, maker_optimizer, critic_optimizer, loader = ps.prepare(
            maker, critic, maker_optimizer, critic_optimizer, data()
        )
        say("joined", clock=ps.clock, epoch=ps.epoch, generation=ps.generation)
        for _ in range(epochs):
            for real, numbers in loader:
                # Noise that depends on nothing that a resume would lose.
                noise = torch.stack([numbers / SAMPLE_COUNT, real[:, 0]], dim=1)
                made = maker(noise)
                critic_optimizer.zero_grad()
                (critic(made.detach()).mean() - critic(real).mean()).backward()
                critic_optimizer.step()
                result = ps.last_push
                assert result is not None
                say(
                    "step",
                    clock=result.clock,
                    epoch=ps.epoch,
                    samples=numbers.tolist(),
                )
                time.sleep(pace_s / 2)  # a checkpoint may be due here
                maker_optimizer.zero_grad()
                (-critic(maker(noise)).mean()).backward()
                maker_optimizer.step()
                time.sleep(pace_s / 2)
        say(
            "end",
            clock=ps.clock,
            model=digest([maker.state_dict(), critic.state_dict()]),
            state=digest(
                [
                    each.state_dict()["state"]
                    for each in (maker_optimizer, critic_optimizer)
                ]
            ),
        )


if __name__ == "__main__":
    train()
