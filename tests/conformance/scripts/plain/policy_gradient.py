"""REINFORCE on a small world: walk along a corridor to the door.

The loader deals out the seeds of episodes. An episode plays out the same whoever
plays it, and they differ in length: the loss is a mean over moves, not over episodes,
so what a gradient weighs is the number of moves behind it.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 16
EPISODE_COUNT = 640
DOOR = 12
MOVES_MAX = 40


def play(policy, seed):
    """Places, moves (0 back, 1 on) and returns of one episode."""
    generator = torch.Generator().manual_seed(int(seed))
    place, places, moves = int(seed) % 3, [], []
    while place < DOOR and len(moves) < MOVES_MAX:
        with torch.no_grad():
            chances = policy(nn.functional.one_hot(torch.tensor(place), DOOR).float())
        move = int(torch.multinomial(chances.softmax(0), 1, generator=generator))
        places.append(place)
        moves.append(move)
        place = max(0, place + (1 if move else -1))
    return places, moves, [-0.1 * (len(moves) - start) for start in range(len(moves))]


def main():
    torch.manual_seed(0)
    loader = DataLoader(range(EPISODE_COUNT), batch_size=BATCH_SIZE, shuffle=True)
    policy = nn.Sequential(nn.Linear(DOOR, 160), nn.Tanh(), nn.Linear(160, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    for seeds in loader:
        episodes = [play(policy, seed) for seed in seeds]
        places, moves, returns = (
            torch.tensor([each for episode in episodes for each in episode[part]])
            for part in range(3)
        )
        logits = policy(nn.functional.one_hot(places, DOOR).float())
        taken = logits.log_softmax(1).gather(1, moves.unsqueeze(1)).squeeze(1)
        loss = -(taken * (returns + 0.8)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item(), len(moves))


if __name__ == "__main__":
    main()
