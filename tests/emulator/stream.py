"""Kernels one after another under programmatic dependent launch, torch's own among them.

Such a kernel starts while the one before it still runs: it may touch what that one wrote or will write only after
griddepcontrol.wait. Results of earlier kernels are there, unless the kernel before let this one start before its own
griddepcontrol.wait. PTX ISA: "griddepcontrol"; CUDA Programming Guide: "Programmatic Dependent Launch".
"""

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode


class Stream(TorchDispatchMode):
    """Inside the `with`, torch's operations on CPU tensors, and calls of `launch`, are the kernels of one stream.

        with Stream() as stream:
            x = torch.zeros(32)                                 # a kernel of torch's
            stream.launch(emulated, x, y, outputs=[y])          # must not touch x or y before griddepcontrol.wait

    `unsettled`: the tensors that the next kernel may not see yet.
    """

    def __init__(self):
        super().__init__()
        self.unsettled = []

    def launch(self, emulated, *arguments, outputs, **options):
        """Run an `Emulated` whose `outputs` are filled with 0xFF bytes (NaNs) before. Returns its Machines."""
        for tensor in outputs:
            blank(tensor)
        machines = emulated(*arguments, after_wait=[*self.unsettled, *outputs], **options)
        older = self.unsettled if any(machine.early_trigger for machine in machines) else []
        self.unsettled = [*older, *outputs]
        return machines

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        if operation.namespace != "aten" and operation._schema.name in OPDEFS:
            with self:  # look inside
                return OPDEFS[operation._schema.name]._init_fn(*arguments, **(keywords or {}))
        result = operation(*arguments, **(keywords or {}))
        if not operation._schema.returns:
            return result
        if not _has_tensor(result):  # the host reads a value back, after all kernels
            self.unsettled = []
        elif "empty" not in operation._schema.name:
            here = {_place(t) for t in _tensors([*arguments, *(keywords or {}).values()])}
            written = [r.alias_info is not None and r.alias_info.is_write for r in operation._schema.returns]
            outputs = result if isinstance(result, (tuple, list)) else [result]
            written += [False] * (len(outputs) - len(written))
            outputs = [t for t, known in zip(outputs, written, strict=False)
                       if isinstance(t, torch.Tensor) and (known or _place(t) not in here)]  # fmt: skip
            if outputs:  # else it is a view
                self.unsettled = outputs
        return result


def blank(tensor):
    """Fill every byte with 0xFF; on the CPU without an operation of torch's, which a Stream would count."""
    if tensor.numel():
        data = tensor.detach().view(-1).view(torch.uint8)
        data.fill_(0xFF) if tensor.is_cuda else data.numpy().fill(0xFF)


def _tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _has_tensor(result):
    return any(True for _ in _tensors(result if isinstance(result, (tuple, list)) else [result]))


def _place(tensor):
    return tensor.untyped_storage().data_ptr()
