"""Several processes which train one run equal a single process: text, noise, statistics, gradients and final state."""

import os
import signal

import pytest
import ranks as support
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import SETTINGS

from tokenv.config import registry
from tokenv.config.components import build_components, check_components
from tokenv.config.files import merge, resolve
from tokenv.config.hardware import BatchAssignment
from tokenv.core import checkpoints
from tokenv.core.errors import UserError
from tokenv.data.corpus import load_corpus
from tokenv.training import update
from tokenv.training.data_parallel import RankStream
from tokenv.training.process_group import Ranks, init_from_torchrun
from tokenv.training.trainer import train

EXACT = 1e-12
PAST = {"arm", "disarm", "arms", "rebar", "relax"}  # want a policy that ignores its past
HNET = {"agent": {"name": "hnet"}, "model": {"pooling": "smooth"}, "rate_target": {"name": "ratio"}}
RATES = {"rate": {"min": 0.1, "max": 0.6}}
SERIES = {
    "data": {
        "kind": "series",
        "seq_len": 32,
        "validation": 0.2,
        "options": {"context": 4, "joint": True, "columns": ["a", "b"], "date": None},
    },
    "codec": {"name": "series"},
}
TINY = {name: SETTINGS[name] for name in ("data", "model", "agent")} | {
    "train": SETTINGS["train"] | {"batch_size": 4},
    "hardware": SETTINGS["hardware"] | {"precision": "float64"},
}
RUN = merge(
    TINY,
    {
        "train": {"symbols": 768, "gradient_accumulation_steps": 2, "warmup_symbols": 128},
        "validation": {"every_symbols": 256, "sequences": 10, "batch_size": 2, "calibrate": True},
        "checkpoint": {"every_symbols": 256, "keep": 10},
    },
)


SHARDS = {"hardware": {"fsdp_size": 2}}


def sharded(case):
    """Return the same case with a model sharded over two processes."""
    chosen, how = case
    return merge(chosen, SHARDS), how


def of_estimator(name, accumulate, **options):
    more = HNET if name == "path" else {"agent": {"window": 0 if name in PAST else 2}}
    chosen = {
        "estimator": {"name": name, **options},
        "train": {"gradient_accumulation_steps": accumulate},
    }
    return merge(merge(TINY, chosen), more)


def every_case(folder):
    """Return cases by name: settings, and whether sequences have different lengths; updates of 4 and of 8 sequences."""
    gaps = folder / "gaps.csv"
    support.write_series(gaps)
    series = merge(SERIES, {"data": {"source": str(gaps)}})
    del (own := {**TINY, "data": {}})["data"]
    series = merge(own, series)
    cases = {
        f"{name} {passes}": of_estimator(name, passes)
        for name in registry.ESTIMATORS
        for passes in (1, 2)
    }
    cases |= {
        "critic of samples 1": of_estimator("text_critic", 1, num_samples=2, warmup=1),
        "clipped head 1": of_estimator("ppo", 1, head_epochs=2),
        "clipped head 2": of_estimator("ppo", 2, head_epochs=2),
        "reward only 1": of_estimator("rloo", 1, reward_only=True),
    }
    cases["muon 2"] = merge(of_estimator("reinforce", 2), {"train": {"optimizer": "muon"}})
    for name in registry.RATE_TARGETS:
        cases[f"rate target {name}"] = merge(TINY, {"rate_target": {"name": name}})
        cases[f"rates, {name}"] = merge(cases[f"rate target {name}"], RATES)
    cases["rates, rloo 2"] = merge(of_estimator("rloo", 2, num_samples=2), RATES)
    cases["rates, exact_count"] = merge({**TINY, "agent": {"name": "exact_count"}}, RATES)
    cases["agent random, rates"] = merge({**TINY, "agent": {"name": "random"}}, RATES)
    cases["rate target of sequences"] = merge(
        TINY, {"rate_target": {"name": "ratio", "over": "sequence"}}
    )
    nawrot = {
        "agent": {"name": "nawrot"},
        "model": {"pooling": "mean"},
        "rate_target": {"name": "binomial"},
    }
    cases["nawrot"] = merge({**TINY, "agent": {}}, merge(nawrot, {"estimator": {"name": "gumbel"}}))
    for agent in (
        {"name": "entropy"},
        {"name": "random_rate"},
        {"name": "random", "rounding": "random"},
        {"name": "exact_count"},
    ):
        cases[f"agent {agent['name']}"] = {**TINY, "agent": agent}
    cases = {name: (case, {"ragged": True}) for name, case in cases.items()}
    cases["frozen"] = of_estimator("rloo", 2), {"frozen": True}
    cases["series"] = series, {}
    cases["series direct 2"] = (
        merge(
            series,
            {
                "codec": {"horizon": 3},
                "loss": {"auxiliary": 1},
                "train": {"gradient_accumulation_steps": 2},
            },
        ),
        {},
    )
    cases["series hnet"] = (
        merge({**series, "agent": {}}, merge(HNET, {"estimator": {"name": "path"}})),
        {},
    )
    return cases


QUICK = (
    *("reinforce 2", "critic of samples 1", "relax 1", "clipped head 1"),
    *("agent entropy", "series", "rates, rloo 2", "muon 2"),
)


SHARDED = ("reinforce 2", "muon 2")


# The teacher has a state of its own, and the estimator begins in the second half.
IMITATING = merge(RUN, {"imitation": {"teacher": {"name": "entropy"}, "fraction": 0.5}})


def trained(ranks, settings, folder, resume=None):
    """Train a run, and return its history without timings."""
    config = resolve([], settings)
    resume = None if resume is None else checkpoints.load(resume)
    _, history = train(config, folder, lambda *_: None, resume=resume, ranks=ranks)
    return {name: values for name, values in history.items() if "per_second" not in name}


def ended(ranks, work):
    """Return the result of a function, or its error as text."""
    try:
        return work()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def broken(ranks, folder, change):
    """Train a run in which rank 1 alone changes the loss in the second step."""
    calls = 0
    total = update.total_loss

    def changed(*arguments):
        nonlocal calls
        calls += 1
        loss = total(*arguments)
        return change(loss) if ranks.rank == 1 and calls == 2 else loss

    update.total_loss = changed
    try:
        return ended(ranks, lambda: trained(ranks, RUN, folder))
    finally:
        update.total_loss = total


def interrupt(loss):
    os.kill(os.getpid(), signal.SIGINT)
    return loss


def work(rank):
    if rank == 1:
        raise UserError("no such file")
    return rank


def streamed(tables):
    """Return the same run on a streamed data set of 80 shards in 8 streams."""
    how = {"source": f"hub:{tables}", "shuffle_buffer": 8, "validation": 0.05}
    return merge(RUN, {"data": how})


def recomputing(does):
    return {"hardware": {"activation_checkpointing": "on" if does else "off"}}


def all_in_a_pair(ranks, cases, folder, saved_alone, tables, saved_streamed):
    """Compute all results which need two processes, in one pair of processes."""
    return {
        "streamed": trained(ranks, streamed(tables), folder / "streamed"),
        "streamed, resumed": trained(
            ranks, streamed(tables), folder / "streamed-resumed", saved_streamed
        ),
        "updates": support.all_updates(ranks, cases),
        "run": trained(ranks, RUN, folder / "run"),
        "resumed": trained(ranks, RUN, folder / "resumed", saved_alone),
        "sharded updates": support.all_updates(
            ranks, {name: sharded(cases[name]) for name in SHARDED}
        ),
        "sharded, one recomputes": support.updates(
            ranks, merge(merge(TINY, SHARDS), recomputing(ranks.is_first))
        ),
        "sharded": trained(ranks, merge(RUN, SHARDS), folder / "sharded"),
        "sharded, resumed": trained(
            ranks, merge(RUN, SHARDS), folder / "sharded-resumed", saved_alone
        ),
        "imitating": trained(ranks, IMITATING, folder / "imitating"),
        "not finite": broken(ranks, folder / "nan", lambda loss: loss * torch.nan),
        "one fails": ended(ranks, lambda: ranks.run_on_all_ranks(lambda: work(ranks.rank))),
        "none fails": ranks.run_on_all_ranks(lambda: ranks.rank),
        "different": ended(ranks, lambda: ranks.assert_consistent({"a": 1, "b": ranks.rank})),
        "uneven": ended(
            ranks,
            lambda: trained(
                ranks,
                merge(RUN, {"train": {"batch_size": 3, "gradient_accumulation_steps": 1}}),
                folder,
            ),
        ),
        "interrupted": broken(ranks, folder / "interrupted", interrupt),
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Train the run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    return trained(Ranks(), RUN, folder), folder


@pytest.fixture(scope="module")
def streamed_alone(tmp_path_factory):
    """Train the streamed run in one process."""
    tables = tmp_path_factory.mktemp("tables")
    folder = tmp_path_factory.mktemp("streamed")
    support.write_tables(tables)
    return trained(Ranks(), streamed(tables), folder), folder, tables


@pytest.fixture(scope="module")
def pair(tmp_path_factory, alone, streamed_alone):
    folder = tmp_path_factory.mktemp("pair")
    cases = {name: case for name, case in every_case(folder).items() if name in QUICK}
    saved = checkpoints.list_complete(alone[1])[0]
    _, streaming, tables = streamed_alone
    more = tables, checkpoints.list_complete(streaming)[0]
    results = support.in_processes(
        2, all_in_a_pair, folder / "results", cases, folder, saved, *more
    )
    assert all(isinstance(each, dict) for each in results), results
    return results, cases, folder


def assert_alike(name, one, several):
    """Check that updates of one process and of several agree, where the noise and fixed agents compute in float32."""
    for result in several:
        for part, difference in support.largest_difference(one, result).items():
            coarse = part == "metrics" and name.startswith("agent") and name != "agent exact_count"
            assert difference < (1e-6 if coarse else EXACT), (name, part)


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_equal_one(pair, name):
    results, cases, _ = pair
    case, how = cases[name]
    assert_alike(
        name, support.updates(Ranks(), case, **how), [each["updates"][name] for each in results]
    )


@pytest.mark.parametrize("name", SHARDED)
def test_two_ranks_with_a_sharded_model_equal_one(pair, name):
    results, cases, _ = pair
    case, how = cases[name]
    assert_alike(
        name,
        support.updates(Ranks(), case, **how),
        [each["sharded updates"][name] for each in results],
    )


def test_ranks_which_share_a_model_may_differ_in_activation_checkpointing(pair):
    results, _, _ = pair
    assert_alike(
        "reinforce",
        support.updates(Ranks(), TINY),
        [each["sharded, one recomputes"] for each in results],
    )


@pytest.mark.slow
@pytest.mark.parametrize(("world", "shard"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_two_and_four_ranks_equal_one_for_every_component(tmp_path, world, shard):
    cases = every_case(tmp_path)
    cases = {
        name: (merge(case, {"hardware": {"fsdp_size": shard}}), how)
        for name, (case, how) in cases.items()
    }
    results = support.in_processes(world, support.all_updates, tmp_path / "results", cases)
    assert all(isinstance(each, dict) for each in results), results
    for name, (case, how) in cases.items():
        assert_alike(name, support.updates(Ranks(), case, **how), [each[name] for each in results])


def assert_same_run(history, expected):
    assert history.keys() == expected.keys()
    for name, (symbols, values) in expected.items():
        assert history[name][0] == symbols, name
        assert history[name][1] == pytest.approx(values, rel=1e-9, abs=1e-11, nan_ok=True), name


@pytest.mark.parametrize("kind", ["run", "sharded"])
def test_a_run_of_two_ranks_equals_the_run_of_one(pair, alone, kind):
    results, _, folder = pair
    for each in results:
        assert_same_run(each[kind], alone[0])
    assert {"calibrated/bits_per_byte", "validation/standard_error"} <= alone[0].keys()
    one, two = (
        checkpoints.load(checkpoints.list_complete(of)[-1]) for of in (alone[1], folder / kind)
    )
    assert two.tensors.keys() == one.tensors.keys()
    assert two.optimizer.keys() == one.optimizer.keys()
    assert two.state["data"] == one.state["data"]
    for name, tensor in (one.tensors | one.optimizer).items():
        assert torch.allclose((two.tensors | two.optimizer)[name], tensor, rtol=0, atol=1e-9), name


@pytest.mark.parametrize(("kind", "resumed"), [("run", "resumed"), ("sharded", "sharded, resumed")])
def test_one_and_two_ranks_resume_from_each_others_checkpoints(
    pair, alone, tmp_path, kind, resumed
):
    results, _, folder = pair
    for each in results:
        assert_same_run(each[resumed], alone[0])
    saved = checkpoints.list_complete(folder / kind)[0]
    assert_same_run(trained(Ranks(), RUN, tmp_path, saved), alone[0])


def test_a_streamed_run_of_two_ranks_equals_one_and_resumes_with_either(
    pair, streamed_alone, tmp_path
):
    results, _, folder = pair
    history, saved_alone, tables = streamed_alone
    for each in results:
        assert_same_run(each["streamed"], history)
        assert_same_run(each["streamed, resumed"], history)
    for one, two in zip(
        checkpoints.list_complete(saved_alone),
        checkpoints.list_complete(folder / "streamed"),
        strict=True,
    ):
        places = checkpoints.load(one).state["data"]
        assert checkpoints.load(two).state["data"] == places
        assert len(places["streams"]) == 8
    saved = checkpoints.list_complete(folder / "streamed")[0]
    assert_same_run(trained(Ranks(), streamed(tables), tmp_path, saved), history)


@pytest.mark.slow
def test_four_ranks_resume_from_a_checkpoint_of_two(pair, alone, tmp_path):
    saved = checkpoints.list_complete(pair[2] / "run")[0]
    for history in support.in_processes(
        4, trained, tmp_path / "results", RUN, tmp_path / "run", saved
    ):
        assert_same_run(history, alone[0])


def test_a_nonfinite_loss_on_one_rank_stops_all(pair):
    results, _, folder = pair
    for each in results:
        assert each["not finite"].startswith("NotFiniteError: step 1: ")
    (saved,) = checkpoints.list_complete(folder / "nan")
    assert f"the last good checkpoint is {saved}" in results[0]["not finite"]


def test_a_signal_to_one_rank_stops_all_after_the_same_step_with_a_checkpoint(
    pair, alone, tmp_path
):
    results, _, folder = pair
    assert [each["interrupted"] for each in results] == ["KeyboardInterrupt: "] * 2
    saved = checkpoints.list_complete(folder / "interrupted")
    assert [path.name for path in saved] == ["step-00000001"] + ["step-00000002"] * (len(saved) - 1)
    assert_same_run(trained(Ranks(), RUN, tmp_path, saved[-1]), alone[0])


def test_two_ranks_imitate_as_one(pair, tmp_path):
    for each in pair[0]:
        assert_same_run(each["imitating"], trained(Ranks(), IMITATING, tmp_path))


def test_an_error_on_one_rank_is_reported_by_the_first(pair):
    results, *_ = pair
    assert [each["one fails"] for each in results] == ["RanksError: rank 1: no such file"] * 2
    assert [each["none fails"] for each in results] == [0, 1]


def test_different_ranks_are_rejected(pair):
    for each in pair[0]:
        assert each["different"].startswith(
            "RanksError: rank 0 has b = 0, and rank 1 has 1: expected the same"
        )


def test_a_number_of_ranks_which_does_not_divide_is_rejected(pair):
    for each in pair[0]:
        assert "2 processes cannot share the 3 sequences of an update evenly" in each["uneven"]
        assert "such as 1" in each["uneven"]


def test_cross_step_state_needs_ranks_which_divide_the_batch():
    config = resolve([], of_estimator("moving_average", 2))
    check_components(config, 4)
    with pytest.raises(
        UserError, match=r"8 processes with train.batch_size = 4: .* keeps state .* such as 4"
    ):
        check_components(config, 8)
    check_components(resolve([], of_estimator("reinforce", 2)), 8)
    with pytest.raises(UserError, match="16 processes cannot share the 8 sequences"):
        check_components(resolve([], of_estimator("reinforce", 2)), 16)


def test_which_components_have_cross_step_state():
    remembering = {
        name
        for name in registry.ESTIMATORS
        if build_components(resolve([], of_estimator(name, 1))).has_cross_step_state
    }
    assert remembering == {
        "moving_average",
        "linear_critic",
        "text_critic",
        "boundary_credit",
        "off_policy",
    }


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12), st.booleans())
def test_every_sequence_belongs_to_exactly_one_rank(accumulate, batch_size, world, split_each_pass):
    fits = batch_size % world == 0 if split_each_pass else (accumulate * batch_size) % world == 0
    if not fits:
        with pytest.raises(UserError, match=f"{world} processes"):
            BatchAssignment(accumulate, batch_size, 0, world, split_each_pass)
        return
    ranks = [
        BatchAssignment(accumulate, batch_size, rank, world, split_each_pass)
        for rank in range(world)
    ]
    taken = [(number, row) for each in ranks for number in each.passes for row in each.rows]
    assert sorted(taken) == [
        (number, row) for number in range(accumulate) for row in range(batch_size)
    ]
    assert len({len(each.rows) for each in ranks}) == len({len(each.passes) for each in ranks}) == 1
    for each in ranks:  # who shares a pass are successive ranks, in the order of their rows
        first = each.rank // each.members * each.members
        rows = [row for other in ranks[first : first + each.members] for row in other.rows]
        assert rows == list(range(batch_size))
        assert all(other.passes == each.passes for other in ranks[first : first + each.members])


@pytest.mark.parametrize(
    ("accumulate", "batch_size", "world"), [(1, 4, 2), (2, 4, 2), (2, 4, 8), (3, 4, 6), (4, 1, 2)]
)
def test_ranks_together_read_the_sequences_of_one(accumulate, batch_size, world):
    corpus = load_corpus(resolve([], TINY).data)
    whole = corpus.train(seed=1)
    ranks = [BatchAssignment(accumulate, batch_size, rank, world) for rank in range(world)]
    streams = [corpus.streams(1, seed=1) for _ in ranks]
    sources = [RankStream(stream, slots) for stream, slots in zip(streams, ranks, strict=True)]
    for _ in range(3):
        expected = [whole.next(batch_size).origin for _ in range(accumulate)]
        for source, slots in zip(sources, ranks, strict=True):
            own = [source.next(len(slots.rows)).origin for _ in slots.passes]
            assert own == [
                expected[number][slots.rows.start : slots.rows.stop] for number in slots.passes
            ]
        assert all(source.state_dict() == whole.state_dict() for source in sources)


def test_an_incomplete_environment_is_rejected():
    with (
        pytest.raises(UserError, match="WORLD_SIZE = 2 and no RANK in the environment"),
        init_from_torchrun({"WORLD_SIZE": "2"}),
    ):
        pass
    with init_from_torchrun({}) as ranks:
        assert ranks == Ranks()
