"""Trains a small network on scikit-learn's handwritten digits, in one process."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 12


def load_data():
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16, labels, test_size=300, random_state=0)
    train_x, test_x, train_y, test_y = map(torch.tensor, split)
    return TensorDataset(train_x.float(), train_y), test_x.float(), test_y


def main():
    torch.manual_seed(0)
    train_set, test_images, test_labels = load_data()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(EPOCHS):
        losses = []
        for images, labels in loader:
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"epoch {epoch}: {len(losses)} steps, summed loss {sum(losses):.2f}")

    with torch.no_grad():
        correct = model(test_images).argmax(1) == test_labels
    print(f"test accuracy {correct.float().mean().item():.3f}")


if __name__ == "__main__":
    main()
