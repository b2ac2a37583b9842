"""A tiny convolutional network with batch norm, dropout and a separate loss."""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(Block(width), Block(width), Block(width))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        return self.head(self.drop(self.blocks(self.stem(images)).mean((2, 3))))


def loss(output, batch):
    return functional.cross_entropy(output, batch["labels"])


def build(batch=4, width=8):
    images, labels = torch.randn(batch, 3, 8, 8), torch.randint(10, (batch,))
    return Net(width), {"images": images, "labels": labels}, loss
