"""Train a digit classifier data-parallel, every gradient averaged with comm_orchestrator.

    python -m torch.distributed.run --standalone --nproc-per-node 2 digits.py

The data are the 1,797 images of the UCI "Optical Recognition of Handwritten Digits" test set, which scikit-learn ships.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from tqdm import tqdm

import comm_orchestrator as dist

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--global-batch", type=int, default=64, help="images a step, over all ranks")
parser.add_argument("--save", help="write the trained weights to this file (rank 0)")
options = parser.parse_args()

dist.init_distributed(config={"comms_logger": {"enabled": True}})
rank, world_size = dist.get_rank(), dist.get_world_size()

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
held_out = torch.arange(len(images)) % 5 == 0
train_images, train_labels = images[~held_out], labels[~held_out]

torch.manual_seed(0)  # the same weights on every rank
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

steps = len(train_images) // options.global_batch
shuffle = torch.Generator().manual_seed(1)  # the same batches on every rank
progress = tqdm(total=options.epochs * steps, unit="step", disable=rank != 0)
for _ in range(options.epochs):
    order = torch.randperm(len(train_images), generator=shuffle)
    for step in range(steps):
        batch = order[step * options.global_batch : (step + 1) * options.global_batch]
        mine = batch[rank::world_size]
        loss = torch.nn.functional.cross_entropy(model(train_images[mine]), train_labels[mine])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op="avg")
        optimizer.step()
        progress.update()
progress.close()

dist.log_summary()
if rank == 0:
    with torch.no_grad():
        accuracy = (model(images[held_out]).argmax(1) == labels[held_out]).float().mean().item()
    print(f"held-out accuracy on {world_size} ranks: {accuracy:.1%}")
    if options.save:
        torch.save(model.state_dict(), options.save)
dist.destroy_process_group()
