def vramscope_who(wanted):
    import gc, torch
    def fields(holder):
        return holder if isinstance(holder, dict) else getattr(holder, "__dict__", None) or {}
    def describe(holder, value):
        names = [str(k) for k, v in list(fields(holder).items()) if v is value]
        if isinstance(holder, dict) and "__name__" in holder and "__builtins__" in holder:
            return "global " + ", ".join(names) + " of module " + str(holder["__name__"])
        text = type(holder).__name__
        if isinstance(holder, (list, tuple, set, dict)):
            text += " of length " + str(len(holder))
        return text + (" under " + ", ".join(names) if names else "")
    def holders(value, depth):
        found = gc.get_referrers(value)
        own.add(id(found))
        for index in range(len(found)):
            holder = found[index]
            if id(holder) in own or type(holder).__name__ in ("frame", "cell", "list_iterator"):
                continue
            print("    " * (4 - depth) + "held by " + describe(holder, value))
            if depth > 1 and "__builtins__" not in fields(holder):
                holders(holder, depth - 1)
    missing, own = set(wanted), set()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    own.add(id(tensors))
    for tensor in tensors:
        try:
            address = tensor.untyped_storage().data_ptr()
        except Exception:
            continue
        if address in wanted:
            missing.discard(address)
            print(hex(address), type(tensor).__name__, tuple(tensor.shape), tensor.dtype)
            holders(tensor, 3)
    if missing:
        print(len(missing), "addresses without a Python tensor: freed since, or held by C++ code,")
        print("such as what autograd saved for a backward pass: look for losses kept with their graph.")

vramscope_who({ADDRESSES})
