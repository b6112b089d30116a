"""Cases that leak: each function makes the step of a training loop."""
import gc
import threading

import simtorch as torch
from model import KIB, MIB, Model, batch_of

RESULTS = {}


def kept_graph(dice):
    """An evaluation with gradients on keeps each output, and with it all activations."""
    model, outputs = Model(), []

    def validate():
        batch = torch.empty(32 * KIB)  # leak
        weight = model.parameters[0]
        hidden = batch * weight  # leak
        return hidden * weight  # leak

    def step(n):
        model.learn(batch_of(dice))
        outputs.append(validate())

    return step


def in_a_list(dice):
    model, history = Model(), []

    def step(n):
        model.learn(batch_of(dice))
        history.append(torch.empty(dice.randrange(16 * KIB, 128 * KIB)))  # leak

    return step


def closure(dice):
    model, callbacks = Model(), []

    def step(n):
        model.learn(batch_of(dice))
        mask = torch.zeros(96 * KIB)  # leak
        callbacks.append(lambda: mask.size_bytes)

    return step


def traceback_kept(dice):
    """An exception keeps the frames that it came through, and their locals."""
    model, errors = Model(), []

    def fragile(n):
        workspace = torch.empty(512 * KIB)  # leak
        if n % 4 == 0:
            raise ValueError(f"bad sample {n} of {workspace.size_bytes}")

    def step(n):
        model.learn(batch_of(dice))
        try:
            fragile(n)
        except ValueError as error:
            errors.append(error)

    return step


def unbounded_cache(dice):
    model, cache = Model(), {}

    def positions(length):
        if length not in cache:
            cache[length] = torch.empty(length * 64)  # leak
        return cache[length]

    def step(n):
        model.learn(batch_of(dice))
        positions(dice.randrange(512, 8192))

    return step


def global_dict(dice):
    model = Model()

    def step(n):
        batch = batch_of(dice)
        model.learn(batch)
        RESULTS[n] = torch.zeros(batch.size_bytes // 16)  # leak

    return step


def hook(dice):
    model, seen = Model(), []
    model.hooks.append(lambda output: seen.append(output.detach()))  # leak

    def step(n):
        model.learn(torch.empty(64 * KIB))

    return step


def two_at_once(dice):
    model, losses, embeddings = Model(), [], []

    def step(n):
        model.learn(batch_of(dice))
        losses.append(torch.empty(40 * KIB))  # leak
        if dice.random() < 0.5:
            embeddings.append(torch.empty(dice.randrange(64 * KIB, 256 * KIB)))  # leak

    return step


def slow(dice):
    """One block every 16 steps."""
    model, snapshots = Model(), []

    def step(n):
        model.learn(batch_of(dice))
        if n % 16 == 15:
            snapshots.append(torch.empty(1536 * KIB))  # leak

    return step


def bursts(dice):
    """Five blocks at once, every 12 steps or so."""
    model, records, due = Model(), [], [10]

    def step(n):
        model.learn(batch_of(dice))
        if n >= due[0]:
            due[0] += dice.randrange(8, 17)
            records.extend(torch.empty(384 * KIB) for _ in range(5))  # leak

    return step


def pinned_host(dice):
    model, staged = Model(), []

    def step(n):
        model.learn(batch_of(dice))
        staged.append(torch.pin_memory(128 * KIB))  # leak

    return step


def driver_level(dice):
    """A library beside PyTorch: a new workspace for each new shape, none given back."""
    model, workspaces = Model(), []

    def step(n):
        model.learn(batch_of(dice))
        if n % 3 == 0:
            workspaces.append(torch.cuda.RawBlock(dice.randrange(512 * KIB, 2 * MIB)))  # leak

    return step


def gradients_kept(dice):
    """What autograd's own thread allocates: the line is the one that called backward."""
    model, norms = Model(layers=2, layer_bytes=128 * KIB), []

    def step(n):
        output = model(batch_of(dice))
        output.loss().backward()  # leak
        norms.append([parameter.grad for parameter in model.parameters])
        model.drop_gradients()

    return step


def cycles_without_gc(dice):
    gc.disable()
    model = Model()

    class Sample:
        def __init__(self):
            self.itself = self
            self.tensor = torch.empty(80 * KIB)  # leak

    def step(n):
        model.learn(batch_of(dice))
        Sample()

    return step


def loader_thread(dice):
    """A second thread of the program fills a queue faster than it is emptied."""
    model, queue, go = Model(), [], threading.Semaphore(0)

    def prefetch():
        while True:
            go.acquire()
            queue.append(torch.empty(64 * KIB))  # leak

    threading.Thread(target=prefetch, daemon=True).start()

    def step(n):
        model.learn(batch_of(dice))
        go.release()
        if n % 2 and queue:
            queue.pop()

    return step


CASES = {
    case.__name__: case
    for case in (
        kept_graph, in_a_list, closure, traceback_kept, unbounded_cache, global_dict, hook,
        two_at_once, slow, bursts, pinned_host, driver_level, gradients_kept, cycles_without_gc,
        loader_thread,
    )
}
