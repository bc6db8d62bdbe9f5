"""Digits, with a mean teacher that follows the student after every step."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 16
EPOCHS = 2


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = pixels[:1024], labels[:1024]
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    criterion = nn.CrossEntropyLoss()
    student = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    teacher = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    model = nn.ModuleDict({"student": student, "teacher": teacher})
    optimizer = torch.optim.Adam(student.parameters(), lr=0.005)
    for _ in range(EPOCHS):
        for images, labels in loader:
            outputs = model["student"](images)
            distance = nn.functional.mse_loss(outputs, model["teacher"](images))
            loss = criterion(outputs, labels) + distance
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for name, its in student.named_parameters():
                    teacher.get_parameter(name).lerp_(its, 0.1)
            print(loss.item(), len(images))


if __name__ == "__main__":
    main()
