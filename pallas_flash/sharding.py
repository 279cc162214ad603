"""Runs a call on the shards of its arrays: by batch and by heads, on whatever mesh they live.

Attention needs no communication between batch rows, nor between kv heads: a device computes its
own part of both with the call as it is, on smaller arrays. What this file does is to say so, in the
three ways in which JAX wants to hear it:

    all mesh axes are manual: inside shard_map      the call, as it is
    some are Explicit: types carry the sharding     shard_map with the operands' own specs
    else: the compiler decides (Auto)               custom_partitioning with a Shardy rule

Each array says what its axes are in a word a axis: "B . N ." is a query. The letters: B batch, N
query heads, K kv heads; any other letter an axis of `vmap`; a dot stands for an axis that every
device needs whole. A result that lacks B or N is a sum over them: it is summed over the devices.
"n" in a result is N, put together on every device: the gradient of what every device has whole.

Knows nothing of attention but that query heads share kv heads in equal groups, in order. A mesh
with more head shards than kv heads repeats the kv heads: each device takes those it needs.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

WHOLE = "."
Labels = Any  # a tree of strings, "B . N .", with a leaf for each array
MeshAxes = tuple[str, ...]


class _Plan(NamedTuple):
    """How one call is cut.

    Attributes:
      axes: letter -> the mesh axes that cut it.
      mesh_shape: mesh axis -> its size.
      num_q_heads, num_kv_heads: of the whole call, 0 where no array has such an axis.
    """

    axes: dict[str, MeshAxes]
    mesh_shape: dict[str, int]
    num_q_heads: int
    num_kv_heads: int

    def parts(self, letter: str) -> int:
        """Into how many parts the axis is cut."""
        return math.prod(self.mesh_shape[a] for a in self.axes.get(letter, ()))

    @property
    def repeats_kv_heads(self) -> bool:
        """The kv heads cannot be cut as the query heads are."""
        return self.num_kv_heads % self.parts("N") != 0

    def spec(self, labels: str) -> PartitionSpec:
        """The sharding of an array."""
        return PartitionSpec(*(self._entry(letter) for letter in labels.split()))

    def _entry(self, letter: str) -> MeshAxes | str | None:
        if letter == "K":
            letter = WHOLE if self.repeats_kv_heads else "N"
        axes = self.axes.get(letter, ())
        return axes[0] if len(axes) == 1 else axes or None

    def summed(self, labels: str) -> MeshAxes:
        """Mesh axes over which a result with these labels is a sum."""
        letters = set(labels.split())
        if "K" in letters and not self.repeats_kv_heads:
            letters.add("N")
        own = {a for x in letters for a in self.axes.get(x, ())}
        return tuple({a: None for axes in self.axes.values() for a in axes if a not in own})


def over_shards(
    run: Callable[..., Any], args: tuple[Any, ...], labels: Labels, results: Labels
) -> Any:
    """run(*args), each device on its own shards.

    Args:
      run: any function of arrays that does the same work on a part of the batch or of the heads.
      args: its arguments, a tree of arrays.
      labels: what their axes are.
      results: the same for what run returns.

    Returns:
      What run returns, sharded as the arguments are.

    Raises:
      ValueError: under Explicit axes, shardings that would need communication; says what to do.
    """
    if explicit_axes(args):
        on_device = lambda *args: _on_one_device(run, args)
        # A kernel wants every axis manual, those that cut nothing, too.
        return over_explicit_shards(on_device, args, labels, results, explicit_axes(args))
    if _is_manual():
        return _on_one_device(run, args)
    return _over_auto_shards(run, args, labels, results)


def explicit_axes(arrays: Any) -> frozenset[str]:
    """The Explicit mesh axes in whose presence the arrays live."""
    mesh = _mesh_of(arrays)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def _mesh_of(arrays: Any):
    """That of the context (within vmap it lacks the mapped axis), else that in the types."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
    meshes.insert(0, jax.sharding.get_abstract_mesh())
    return next((m for m in meshes if not m.empty), meshes[0])


def _is_manual() -> bool:
    """True inside a shard_map that leaves nothing to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = [name for name, kind in kinds.items() if kind == AxisType.Manual]
    auto = [name for name in mesh.axis_names if name not in manual and mesh.shape[name] > 1]
    if manual and auto:
        raise NotImplementedError(
            f"the kernels run inside a shard_map over {manual} that leaves the mesh axes {auto} to "
            "the compiler: make every axis manual (leave axis_names out of shard_map and name the "
            "others in its specs), or use implementation='xla'"
        )
    return bool(manual)


def like(x: Any, operand: Any) -> Any:
    """x, sharded as its operand is where the types say it (Explicit axes)."""
    return jax.sharding.reshard(x, jax.typeof(operand).sharding) if explicit_axes(operand) else x


def whole_where(words: str, operand: Any) -> str:
    """The words of the operand's gradient: "n" for N where types say that every device has all."""
    if not explicit_axes(operand):
        return words
    spec = jax.typeof(operand).sharding.spec
    entries = (*spec, *(None,) * (operand.ndim - len(spec)))
    cut = zip(words.split()[-operand.ndim :], entries, strict=True)
    whole = any(letter == "N" and entry is None for letter, entry in cut)
    return words.replace("N", "n") if whole else words


def labelled(words: Labels, arrays: Any) -> Labels:
    """The words for these arrays: an axis of size 1 serves every part of what it broadcasts to."""

    def one(x, word):
        letters = zip(word.split(), x.shape, strict=False)  # a scalar may stand for a batch of them
        return " ".join(WHOLE if size == 1 else letter for letter, size in letters)

    return jax.tree.map(one, arrays, words)


# --- how to cut -----------------------------------------------------------------------------------


def _plan(labels: list[str], shapes: list[Any], specs: list[Any], mesh_shape) -> _Plan:
    """Each letter is cut as the first array is that has it cut; what does not divide is not."""
    axes: dict[str, MeshAxes] = {}
    sizes: dict[str, int] = {}
    for word, shape in zip(labels, shapes, strict=True):
        sizes |= dict(zip(word.split(), shape, strict=True))
    for word, spec in zip(labels, specs, strict=True):
        for letter, entry in zip(word.split(), spec, strict=False):
            taken = {a for used in axes.values() for a in used}
            found = tuple(a for a in _names(entry) if a not in taken)
            parts = math.prod(mesh_shape[a] for a in found)
            if letter in axes or letter in (WHOLE, "K") or not found or sizes[letter] % parts:
                continue
            axes[letter] = found
    return _Plan(axes, dict(mesh_shape), sizes.get("N", 0), sizes.get("K", 0))


def _names(entry: Any) -> MeshAxes:
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def _local(run: Callable[..., Any], plan: _Plan, labels: list[str], results: Labels):
    """run on the shards of one device, and what the results want of the other devices."""

    def on_shards(*args):
        leaves, tree = jax.tree.flatten(args)
        if plan.repeats_kv_heads:
            leaves = [_own_kv_heads(plan, x, w) for x, w in zip(leaves, labels, strict=True)]
        out = run(*jax.tree.unflatten(tree, leaves))
        return jax.tree.map(functools.partial(_whole, plan), out, results)

    return on_shards


def _own_kv_heads(plan: _Plan, x, word: str):
    """Of all kv heads those that the query heads of this shard read, one a group that shares."""
    if "K" not in word.split():
        return x
    return jnp.take(x, _kv_heads_of_shard(plan), axis=word.split().index("K"))


def _kv_heads_of_shard(plan: _Plan):
    """int32: the kv head of each group of query heads of this shard.

    A group is as many query heads as divide both a shard and a kv head's own group: then no group
    reads two kv heads.
    """
    shard = plan.num_q_heads // plan.parts("N")
    q_per_kv = plan.num_q_heads // plan.num_kv_heads
    group = math.gcd(shard, q_per_kv)
    first = lax.axis_index(plan.axes["N"]) * shard
    return (first + jnp.arange(0, shard, group)) // q_per_kv


def _whole(plan: _Plan, x, word: str):
    """A result of one shard, with what other devices add to it."""
    axes = plan.summed(word)
    if not axes:
        return x
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    letters = word.split()
    if "K" in letters and plan.repeats_kv_heads:
        axis = letters.index("K")
        wide = _put(wide, axis, plan.num_kv_heads, _kv_heads_of_shard(plan))
    if "n" in letters and plan.parts("N") > 1:
        axis = letters.index("n")
        first = lax.axis_index(plan.axes["N"]) * x.shape[axis]
        wide = _put(wide, axis, plan.num_q_heads, first + jnp.arange(x.shape[axis]))
    return lax.psum(wide, axes).astype(x.dtype)


def _put(x, axis: int, size: int, places):
    """Zeros of `size` along `axis` with x added at these places."""
    zeros = jnp.zeros((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)
    return zeros.at[(slice(None),) * axis + (places,)].add(x)


# --- inside shard_map -----------------------------------------------------------------------------


def vary_alike(arrays: Any) -> Any:
    """The arrays, each typed as different on every device where one of them is (check_vma).

    Done ahead of any custom derivative, it makes of its gradients what the arrays' types ask for:
    JAX sums those of an array that all devices share.
    """
    varying = lambda x: jax.typeof(x).manual_axis_type.varying
    every = frozenset().union(*(varying(x) for x in jax.tree.leaves(arrays)))

    def cast(x):
        missing = tuple(every - varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, arrays)


# A kernel keeps no account of which of its numbers differ from device to device, and JAX finds
# that its loops do not add up. So its program is traced without, and the results typed again.
_device_p = Primitive("pallas_flash_on_one_device")
_device_p.multiple_results = True


@_device_p.def_abstract_eval
def _typed_as_the_arguments(*avals, program):
    kind = avals[0].manual_axis_type
    return [aval.update(manual_axis_type=kind) for aval in program.out_avals]


def _lower_program(ctx, *values, program):
    untyped = ctx.replace(avals_in=program.in_avals, avals_out=program.out_avals)
    return mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(untyped, *values)


mlir.register_lowering(_device_p, _lower_program)


def _on_one_device(run: Callable[..., Any], args: tuple[Any, ...]):
    """run(*args) where types may say which axes they vary over."""
    args = vary_alike(args)
    untyped = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    program, shapes = jax.make_jaxpr(run, return_shape=True)(*untyped)
    if program.effects:  # interpret mode
        return run(*args)
    out = _device_p.bind(*jax.tree.leaves(args), program=program)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


# --- Auto axes ------------------------------------------------------------------------------------


def _over_auto_shards(run: Callable[..., Any], args: Any, labels: Labels, results: Labels):
    """run(*args), such that the compiler cuts it. On a single device it is run as it stands."""
    whole, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
    tree = jax.tree.structure(shapes)

    # custom_partitioning forbids constants of its function: they travel as arguments.
    def run_whole(consts, *args):
        flat = core.eval_jaxpr(whole.jaxpr, consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(tree, flat)

    if whole.effects:  # interpret mode: the compiler cuts no program with effects
        return run_whole(whole.consts, *args)
    consts = [jnp.asarray(x) for x in whole.consts]
    const_words = [" ".join(WHOLE * x.ndim) for x in consts]
    on_shards = lambda consts, *args: run(*args)
    call = _partitioned(run_whole, on_shards, (const_words, *labels), results)
    return call(consts, *args)


def _partitioned(run_whole: Callable[..., Any], run: Callable[..., Any], labels, results):
    """`run_whole` with a rule for the compiler: on shards it is `run`."""
    words, result_words = jax.tree.leaves(labels), jax.tree.leaves(results)

    def partition(mesh, args, result_shapes):
        leaves, tree = jax.tree.flatten(args)
        plan = _plan(
            words, [x.shape for x in leaves], [x.sharding.spec for x in leaves], mesh.shape
        )
        place = lambda word: NamedSharding(mesh, plan.spec(word))
        given = jax.tree.unflatten(tree, [place(word) for word in words])
        made = jax.tree.unflatten(jax.tree.structure(result_shapes), map(place, result_words))
        return mesh, _local(run, plan, words, results), made, given

    call = custom_partitioning(run_whole)
    rule, whole = _shardy_rule(words, result_words)
    call.def_partition(partition, sharding_rule=rule, need_replication_factors=whole)
    return call


def _shardy_rule(words: list[str], result_words: list[str]):
    """The einsum-like rule, and its factors that must not be cut.

    Query heads and kv heads are no relatives in it: were the one a factor of the other, Shardy
    would cut a mesh axis in two wherever it is larger than the number of kv heads.
    """
    whole: list[str] = []

    def factor(letter: str) -> str:
        if letter == WHOLE:
            whole.append(f"w{len(whole)}")
            return whole[-1]
        return letter

    sides = [
        ", ".join(" ".join(map(factor, word.split())) for word in side)
        for side in (words, result_words)
    ]
    return " -> ".join(sides), tuple(whole)


# --- Explicit axes --------------------------------------------------------------------------------


def over_explicit_shards(
    run: Callable[..., Any],
    args: tuple[Any, ...],
    labels: Labels,
    results: Labels,
    manual: frozenset[str] = frozenset(),
) -> Any:
    """`over_shards` where the types of the arguments carry their sharding.

    JAX differentiates it, and maps it over a mesh axis that cuts nothing here, if not in `manual`.

    What every device has whole stays so, and each cuts its own part out of it: the gradient of such
    an argument is one sum over the devices.

    Raises:
      NotImplementedError: vmap maps an axis that is cut by one of `manual`.
    """
    leaves = jax.tree.leaves(args)
    words = jax.tree.leaves(labels)
    mesh = _mesh_of(args)
    plan = _plan(words, [x.shape for x in leaves], [spec_of(x) for x in leaves], mesh.shape)
    manual = manual | {a for axes in plan.axes.values() for a in axes}
    on_shards, in_specs = _by_own_specs(run, plan, args, labels, results)
    out_specs = jax.tree.map(plan.spec, results)
    options: dict[str, Any] = dict(in_specs=in_specs, out_specs=out_specs, axis_names=manual)
    try:
        return jax.shard_map(on_shards, mesh=mesh, **options)(*args)
    except ValueError as error:
        if "axis_names" not in str(error):
            raise
        # Within vmap a mesh axis that cuts the mapped one is nobody's; kernels need all of a mesh.
        raise NotImplementedError(
            "vmap maps an axis that is sharded over an Explicit mesh axis: shard another axis, "
            "make the mesh Auto (axis_types=AxisType.Auto), or use implementation='xla'"
        ) from error


def _by_own_specs(run: Callable[..., Any], plan: _Plan, args: Any, labels: Labels, results: Labels):
    """run on shards as the types of the arguments cut them, and the specs that say so."""
    leaves, tree = jax.tree.flatten(args)
    words, specs = jax.tree.leaves(labels), [spec_of(x) for x in leaves]
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    for path, word, spec in zip(paths, words, specs, strict=True):
        name = ".".join(map(_key_name, path[1:])) or "an argument"
        _check_cut(plan, name, word, spec)

    def on_shards(*args):
        cut = map(functools.partial(_own_part, plan), jax.tree.leaves(args), words, specs)
        return _local(run, plan, words, results)(*jax.tree.unflatten(tree, list(cut)))

    return on_shards, jax.tree.unflatten(tree, [PartitionSpec(*spec) for spec in specs])


def _key_name(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "key", key)))


def spec_of(x) -> tuple[MeshAxes, ...]:
    """The mesh axes that cut each axis of x, as its type says (Explicit axes)."""
    spec = jax.typeof(x).sharding.spec
    return tuple(map(_names, (*spec, *(None,) * (x.ndim - len(spec)))))


def _check_cut(plan: _Plan, name: str, word: str, spec: tuple[MeshAxes, ...]) -> None:
    for axis, (letter, found) in enumerate(zip(word.split(), spec, strict=True)):
        wanted = plan.spec(letter)[0]
        if not found or found == _names(wanted):
            continue
        if letter != WHOLE:
            raise ValueError(
                f"{name} is sharded over the mesh axes {found} along axis {axis}, the call over "
                f"{_names(wanted)} there: something would have to move; use jax.sharding.reshard "
                "on it"
            )
        raise ValueError(
            f"{name} is sharded over the mesh axes {found} along axis {axis}, which attention "
            "needs whole: for a sequence split over devices use pallas_flash.parallel, else "
            "jax.sharding.reshard"
        )


def _own_part(plan: _Plan, x, word: str, spec: tuple[MeshAxes, ...]):
    """What this device reads of an array that it has more of."""
    for axis, (letter, found) in enumerate(zip(word.split(), spec, strict=True)):
        wanted = _names(plan.spec(letter)[0])
        if wanted and not found:
            size = x.shape[axis] // math.prod(plan.mesh_shape[a] for a in wanted)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(wanted) * size, size, axis)
    return x


# --- axes by name ---------------------------------------------------------------------------------

_MEANINGS = {"B": "batch", "T": "query length", "S": "key length", "N": "query heads"}


def given_mesh(mesh: Any, arrays: Any) -> Any:
    """The mesh to run on: that given, else that of `jax.set_mesh`.

    Raises:
      ValueError: there is none, or the arrays live on another, or its axes are manual already.
    """
    chosen = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if chosen.empty:
        raise ValueError("there is no mesh: pass mesh=, or call this under jax.set_mesh(mesh)")
    if AxisType.Manual in chosen.axis_types or AxisType.Manual in _context_types():
        raise ValueError(
            "the mesh axes are manual: inside jax.shard_map call "
            "pallas_flash.parallel.ring_attention with axis_name="
        )
    for x in jax.tree.leaves(arrays):
        other = jax.typeof(x).sharding.mesh
        if other.empty or dict(other.shape) == dict(chosen.shape):
            continue
        raise ValueError(
            f"an array lives on a mesh of {dict(other.shape)}, the call is for one of "
            f"{dict(chosen.shape)}: pass the arrays' own mesh, or move them with jax.device_put"
        )
    return chosen


def _context_types() -> tuple[Any, ...]:
    return jax.sharding.get_abstract_mesh().axis_types


def over_named_axes(
    run: Callable[..., Any],
    args: tuple[Any, ...],
    labels: Labels,
    results: Labels,
    axes: dict[str, Any],
    mesh: Any,
) -> Any:
    """run(*args) in a shard_map over the mesh axes named for each letter; JAX differentiates it.

    Raises:
      ValueError: the mesh lacks an axis, or does not divide what it is to cut.
    """
    leaves, tree = jax.tree.flatten(args)
    words = jax.tree.leaves(labels)
    cut = {letter: _names(names) for letter, names in axes.items() if names is not None}
    for names in cut.values():
        for name in names:
            if name not in mesh.shape:
                raise ValueError(f"mesh axis {name!r} is none of {tuple(mesh.axis_names)}")
    sizes: dict[str, int] = {}
    for word, x in zip(words, leaves, strict=True):
        sizes |= dict(zip(word.split(), x.shape, strict=True))
    plan = _Plan(cut, dict(mesh.shape), sizes.get("N", 0), sizes.get("K", 0))
    for letter in cut:
        if sizes[letter] % plan.parts(letter):
            raise ValueError(
                f"{_MEANINGS[letter]} {sizes[letter]} over the mesh axes {cut[letter]} of "
                f"{plan.parts(letter)} devices: it must be a multiple of that; pad it, or use "
                "fewer devices there"
            )
    if explicit_axes(args):
        on_shards, in_specs = _by_own_specs(run, plan, args, labels, results)
    else:
        on_shards = _local(run, plan, words, results)
        in_specs = jax.tree.unflatten(tree, map(plan.spec, words))
    out_specs = jax.tree.map(plan.spec, results)
    return jax.shard_map(on_shards, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*args)
