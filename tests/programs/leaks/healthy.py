"""Cases that do not leak, however it looks for a while: each function makes the step of a training
loop."""
import collections
import gc

import simtorch as torch
from model import KIB, MIB, Model, batch_of


def warm_up_then_flat(dice):
    """Buffers appear over the first steps and stay."""
    model, buffers = Model(), []

    def step(n):
        model.learn(batch_of(dice))
        if n < 60:
            buffers.append(torch.empty(512 * KIB))

    return step


def variable_shapes(dice):
    model, held = Model(), []

    def step(n):
        held[:] = [batch_of(dice, 64 * KIB, 16 * MIB)]
        model.learn(held[0])

    return step


def evaluation(dice):
    """Every 90 steps or so, outputs are gathered for a while and then dropped."""
    model, outputs = Model(), []
    begin = dice.randrange(40, 80)

    def step(n):
        model.learn(batch_of(dice))
        if (n - begin) % 90 < 20 and n >= begin:
            with torch.no_grad():
                outputs.append(model(torch.empty(MIB)))
        else:
            outputs.clear()

    return step


def checkpointing(dice):
    """Activations are made again in the backward pass, on autograd's thread."""
    model = Model()

    def step(n):
        output = torch.checkpoint(model, batch_of(dice))
        output.loss().backward()
        model.drop_gradients()

    return step


def bounded_cache(dice):
    """A cache of the last 24 shapes."""
    model, cache = Model(), collections.OrderedDict()

    def step(n):
        model.learn(batch_of(dice))
        shape = dice.randrange(64)
        if shape not in cache:
            cache[shape] = torch.empty((shape + 1) * 32 * KIB)
        cache.move_to_end(shape)
        while len(cache) > 24:
            cache.popitem(last=False)

    return step


def lazy_optimizer(dice):
    """Moments are made at the second step."""
    model, moments = Model(layers=6), []

    def step(n):
        model.learn(batch_of(dice))
        if n == 1:
            for parameter in model.parameters:
                moments.append(torch.zeros(2 * parameter.size_bytes))

    return step


def prefetch_queue(dice):
    """A queue of batches whose length wanders between 0 and 12, on pinned and device memory."""
    model, queue = Model(), collections.deque()

    def step(n):
        model.learn(batch_of(dice))
        for _ in range(dice.randrange(3)):
            if len(queue) < 12:
                batch = torch.empty(dice.randrange(MIB, 2 * MIB))
                queue.append((torch.pin_memory(256 * KIB), batch))
        if queue and dice.random() < 0.9:
            queue.popleft()

    return step


def sawtooth(dice):
    """Cycles that the collector finds every 37 steps."""
    gc.disable()
    model = Model()

    class Sample:
        def __init__(self):
            self.itself = self
            self.tensor = torch.empty(dice.randrange(256 * KIB, MIB))

    def step(n):
        model.learn(batch_of(dice))
        Sample()
        if n % 37 == 36:
            gc.collect()

    return step


def trimmed_pool(dice):
    """A pool grows to 40 blocks and is trimmed to 5, again and again."""
    model, pool = Model(), []

    def step(n):
        model.learn(batch_of(dice))
        if dice.random() < 0.6:
            pool.append(torch.empty(768 * KIB))
        if len(pool) > 40:
            del pool[5:]

    return step


def several_devices(dice):
    """Layers on each device; activations go from one to the next."""
    models = []
    for device in range(torch.cuda.device_count()):
        torch.cuda.set_device(device)
        models.append(Model(layers=2))
    torch.cuda.set_device(0)

    def step(n):
        size = dice.randrange(256 * KIB, 2 * MIB)
        for device, model in enumerate(models):
            torch.cuda.set_device(device)
            model.learn(torch.empty(size))

    return step


def late_second_warm_up(dice):
    """Fine-tuning begins in the middle: buffers appear again, then nothing more."""
    model, buffers = Model(), []

    def step(n):
        model.learn(batch_of(dice))
        if n < 30 or 180 <= n < 215:
            buffers.append(torch.empty(MIB))

    return step


def workspace_reused(dice):
    """Memory of the driver: one workspace that is made anew when it is too small."""
    model, workspace = Model(), [torch.cuda.RawBlock(MIB)]

    def step(n):
        model.learn(batch_of(dice))
        needed = dice.randrange(MIB, 24 * MIB)
        if needed > workspace[0].size_bytes or n % 25 == 0:
            workspace[0].free()
            workspace[0] = torch.cuda.RawBlock(needed)

    return step


CASES = {
    case.__name__: case
    for case in (
        warm_up_then_flat, variable_shapes, evaluation, checkpointing, bounded_cache,
        lazy_optimizer, prefetch_queue, sawtooth, trimmed_pool, several_devices,
        late_second_warm_up, workspace_reused,
    )
}
