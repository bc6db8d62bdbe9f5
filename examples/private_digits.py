"""Trains on scikit-learn's handwritten digits with differential privacy.

psserver local --shards 2 --listen 127.0.0.1:7070 --state-dir state --min-workers 2
psworker run --coordinator 127.0.0.1:7070 --nproc 2 -- examples/private_digits.py
psctl status --coordinator 127.0.0.1:7070
"""

import psworker
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 20

PRIVATE = psworker.DifferentialPrivacy(
    noise_multiplier=4.0, max_grad_norm=1.0, delta=1e-5, epsilon_max=5.0
)


def load_data():
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16, labels, test_size=300, random_state=0)
    train_x, test_x, train_y, test_y = map(torch.tensor, split)
    return TensorDataset(train_x.float(), train_y), test_x.float(), test_y


def main():
    torch.manual_seed(0)
    train_set, test_images, test_labels = load_data()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    # Large batches: the bound is the same for any, and the noise is spread over them.
    loader = DataLoader(train_set, batch_size=256, shuffle=True)
    criterion = nn.CrossEntropyLoss()
    with psworker.connect() as ps:
        model, optimizer, loader = ps.prepare(
            model, optimizer, loader, differential_privacy=PRIVATE
        )
        for _ in range(EPOCHS):
            for images, labels in loader:
                criterion(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()

    with torch.no_grad():
        correct = model(test_images).argmax(1) == test_labels
    print(f"test accuracy {correct.float().mean().item():.3f}")


if __name__ == "__main__":
    main()
