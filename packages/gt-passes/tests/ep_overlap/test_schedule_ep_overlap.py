"""How ScheduleEpOverlap interleaves chunks, and what stops it."""

from __future__ import annotations

import pytest
import torch
from ep_overlap.chunked_graphs import (
    capture_forward,
    capture_step,
    chunk,
    exchanged,
    forward_of_chunk,
    forward_region,
    order,
)
from ep_overlap.scheduled_step_cases import outputs_before_and_after
from expecttest import assert_expected_inline
from fsdp_graphs import gathered, of_unknown_effect, reduce_scattered
from pass_graphs import capture, collectives, program, run_pass

from gt_config.node_keys import ChunkAnnotation
from gt_passes import ScheduleEpOverlap, Verifier
from gt_passes.ep_overlap import (
    exposed_exchanges,
    interrupted_exchanges,
    register_exchange_operator,
)
from gt_passes.errors import ChunkMetadataError
from gt_trace.node_metadata import read_annotation, remove_annotation, write_annotation
from gt_trace.testing import GlooWorkers

X = torch.ones(8, 2)
DY = torch.ones(8, 2)
W = torch.ones(2, 2)


def scheduled(graph_module):
    """What the pass makes of a graph: the order, once verifier and checker have seen it."""
    run_pass(ScheduleEpOverlap(), graph_module)
    assert not Verifier().verify(graph_module).problems
    assert exposed_exchanges(graph_module) == ()
    return order(graph_module)


def test_two_chunks_take_turns_forward():
    """
    network       [= d0 =]      [= c0 =]      [= d1 =]      [= c1 =]
    compute  cos0          exp0          sin0|cos1    exp1          sin1

    network       [= d0 =][= d1 =][= c0 =][= c1 =]
    compute  cos0  cos1    exp0    exp1    sin0    sin1
    """
    graph_module = capture_forward(2)
    assert len(exposed_exchanges(graph_module)) == 4
    assert_expected_inline(
        scheduled(graph_module),
        """split cos0 launch0 cos1 launch1 wait0 exp0 launch0 wait1 exp1 launch1 wait0 sin0 wait1 sin1 cat""",
    )


def test_three_chunks_take_turns_forward():
    """
    network       [= d0 =][= d1 =][= d2 =][= c0 =][= c1 =][= c2 =]
    compute  cos0  cos1    cos2    exp0    exp1    exp2    sin0     sin1 sin2
    """
    assert_expected_inline(
        scheduled(capture_forward(3)),
        """split cos0 launch0 cos1 launch1 cos2 launch2 wait0 exp0 launch0 wait1 exp1 launch1 wait2 exp2 launch2 wait0 sin0 wait1 sin1 wait2 sin2 cat""",
    )


def test_backward_goes_in_reverse_and_launches_before_it_computes_weight_gradients():
    """The gradient of a weight (mm) is needed by no exchange: it stands behind the next launch.

    network       [= c1 =][= c0 =][== d1 ==][== d0 ==]
    compute  cos1  cos0    exp1    mm1 exp0  mm0  sin1  sin0
    """
    words = scheduled(capture_step(2)).split(" split ")
    assert_expected_inline(
        words[-1],
        """cos1 launch1 cos0 launch0 t0 t1 wait1 exp1 launch1 mm1 wait0 exp0 launch0 mm0 wait1 sin1 wait0 sin0 cat add""",
    )


def test_three_chunks_backward():
    """
    network       [= c2 =][= c1 =][= c0 =][= d2 =] ...
    compute  cos2  cos1    cos0    exp2    mm2 exp1 ...
    """
    words = scheduled(capture_step(3)).split(" split ")
    assert words[-1].split()[:6] == ["cos2", "launch2", "cos1", "launch1", "cos0", "launch0"]
    assert words[-1].index("exp2") < words[-1].index("exp1") < words[-1].index("exp0")


def test_blocks_that_chain_overlap_across_their_border():
    """The last exchange of a block hides behind the first computation of the next.

    network       [d0][d1][c0][c1]   [d0'] ...
    compute  cos0 cos1 exp0 exp1 sin0 cos0' sin1 cos1' ...
    """

    def chained(x):
        with chunk(None, root="layers.0", role="split_boundary"):
            parts = list(torch.split(x, 4))
        for layer in ("layers.0", "layers.1"):
            for number in range(2):
                with chunk(number, root=layer):
                    parts[number] = forward_of_chunk(parts[number])
        with chunk(None, root="layers.1", role="materialization"):
            return torch.cat(parts)

    graph_module = capture(chained, X)
    assert_expected_inline(
        scheduled(graph_module),
        """split cos0 launch0 cos1 launch1 wait0 exp0 launch0 wait1 exp1 launch1 wait0 sin0 cos0 launch0 wait1 sin1 cos1 launch1 wait0 exp0 launch0 wait1 exp1 launch1 wait0 sin0 wait1 sin1 cat""",
    )


def test_counts_are_exchanged_first_and_read_by_the_host_before_the_tokens_go():
    """
    network       [count0][= d0 =] [count1][= d1 =]
    compute  sum0  cos0        sum1  cos1
    """

    def of_chunk(part):
        routed = part.cos()
        counts = exchanged(part.sum(dim=1).long(), kind="token_count_exchange")
        scale = counts.sum().item()
        return exchanged(routed * scale).exp()

    graph_module = capture(lambda x: forward_region(x, 2, of_chunk=of_chunk), X)
    assert_expected_inline(
        scheduled(graph_module),
        """split sum0 _to_copy0 launch0 cos0 wait0 sum0 _local_scalar_dense0 mul0 launch0 sum1 _to_copy1 launch1 cos1 wait1 sum1 _local_scalar_dense1 mul1 launch1 wait0 exp0 wait1 exp1 cat""",
    )


def test_written_buffers_and_draws_keep_their_order():
    """Each chunk counts its tokens in one buffer, and drops some of its values."""

    def whole(x, buffer):
        def of_chunk(part):
            buffer.add_(part.sum())
            return torch.nn.functional.dropout(forward_of_chunk(part), 0.5)

        return forward_region(x, 2, of_chunk=of_chunk)

    words = scheduled(capture(whole, X, torch.zeros(1))).split()
    assert words.index("add_0") < words.index("add_1")


def test_nothing_passes_an_operator_of_unknown_effect():
    graph_module = capture(
        lambda x: forward_region(x, 2, of_chunk=lambda p: of_unknown_effect(forward_of_chunk(p))),
        X,
    )
    before = program(graph_module)
    assert not run_pass(ScheduleEpOverlap(), graph_module).changed
    assert program(graph_module) == before
    assert [each.chunk_id for each in exposed_exchanges(graph_module)] == [0, 0, 1, 1]


def test_chunks_whose_exchange_nobody_registered_are_said_to_be_left():
    graph_module = capture(
        lambda x: forward_region(x, 2, of_chunk=lambda p: of_unknown_effect(p.cos())), X
    )
    report = run_pass(ScheduleEpOverlap(), graph_module)
    assert not report.changed
    (refusal,) = report.refusals
    assert refusal.node_name == "cos"
    assert_expected_inline(
        refusal.reason,
        """no chunk has a token exchange that is known: another operator than all_to_all_single has to be registered (register_exchange_operator)""",
    )


def test_chunks_of_a_stage_may_exchange_nothing():
    """Its layers may be dense; those of other stages have the exchanges."""
    graph_module = capture(lambda x: forward_region(x, 2, of_chunk=torch.cos), X)
    report = run_pass(ScheduleEpOverlap(of_stage=True), graph_module)
    assert not report.changed
    assert report.refusals == ()


def test_graphs_without_chunks_are_left_alone():
    graph_module = capture(lambda x: forward_of_chunk(x), X)
    before = program(graph_module)
    assert not run_pass(ScheduleEpOverlap(), graph_module).changed
    assert program(graph_module) == before


@pytest.mark.parametrize("num_chunks", [2, 3])
def test_running_it_again_changes_nothing(num_chunks):
    graph_module = capture_step(num_chunks)
    assert run_pass(ScheduleEpOverlap(), graph_module).changed
    before = program(graph_module)
    assert not run_pass(ScheduleEpOverlap(), graph_module).changed
    assert program(graph_module) == before


def test_producers_are_not_told_apart():
    orders = []
    for producer in ("graph", "eager"):
        graph_module = capture_step(2)
        for node in graph_module.graph.nodes:
            found = read_annotation(node, ChunkAnnotation)
            if found is not None:
                fields = {**found.to_meta()[ChunkAnnotation.KEY], "producer": producer}
                write_annotation(node, ChunkAnnotation(**fields))
        orders.append(scheduled(graph_module))
    assert orders[0] == orders[1]


def test_no_exchange_hides_behind_what_only_allocates_or_fills():
    """Between the launch and the wait of chunk 0, chunk 1 makes zeros and counts; then a sine.

    network       [======= d0 =======]
    compute  cos0   empty1 zeros1 ...   (exposed)     [= d0 = sin1 =] (hidden)
    """

    def with_between(between):
        def region(x):
            with chunk(0):
                there = collectives.all_to_all_single(x[:4].cos(), [2, 2], [2, 2], "ep")
            with chunk(1):
                made = between(x[4:])
            with chunk(0):
                return collectives.wait_tensor(there).exp(), made

        return exposed_exchanges(capture(region, X))

    assert len(with_between(lambda part: (torch.empty(2), torch.zeros_like(part)))) == 1
    assert len(with_between(lambda part: (torch.arange(3), part.new_ones(4)))) == 1
    assert with_between(torch.sin) == ()


# ---- FSDP ---------------------------------------------------------------------------------------


def test_fsdp_collectives_go_where_no_exchange_is_in_flight():
    """Gathered for the experts before the region; reduced behind it.

    network  [= g =]      [= d0 =][= d1 =][= c0 =][= c1 =]     [= r =]
    compute         cos0   cos1    mm0     mm1     sin0    sin1
    """

    def region(w, x, dz):
        done = []
        for number in range(2):
            with chunk(number):
                there = exchanged(x[4 * number :][:4].cos())
            if number == 0:
                whole = gathered(w, "layers.1.moe.w")
            with chunk(number):
                done.append(exchanged(there @ whole).sin())
            if number == 0:
                reduced = reduce_scattered(done[0] + dz, "layers.2.v")
        return done, reduced

    graph_module = capture(region, torch.ones(1, 2), X, torch.ones(4, 2))
    words = scheduled(graph_module)
    assert interrupted_exchanges(graph_module) == ()
    assert_expected_inline(
        words,
        """all_gather_into_tensor slice0 slice0 cos0 launch0 slice1 slice1 cos1 launch1 wait wait0 mm0 launch0 wait1 mm1 launch1 wait0 sin0 add wait1 sin1 reduce_scatter_tensor wait div""",
    )


def test_fsdp_collectives_of_a_stage_make_no_gap_since_its_cut_takes_them_out():
    """Of two layers that chain, the second's first exchange hides the first's last.

    step   network  [g][= d0 =][= d1 =][= c0 =][= c1 =][r]      [= d0 =][= d1 =]
    stage  network  [g][= d0 =][= d1 =][= c0 =][= c1 =][= d0 =][= d1 =]      [r]
    """

    def layers(w, x, dz):
        first = []
        for number in range(2):
            with chunk(number):
                first.append(forward_of_chunk(x[4 * number :][:4]))
        whole = gathered(w, "layers.2.moe.w")
        reduced = reduce_scattered(first[0] + dz, "layers.1.v")
        second = []
        for number in range(2):
            with chunk(number, root="layers.2.moe"):
                second.append(exchanged(first[number] @ whole).sin())
        return second, reduced

    orders = []
    for of_stage in (False, True):
        graph_module = capture(layers, torch.ones(1, 2), X, torch.ones(4, 2))
        run_pass(ScheduleEpOverlap(of_stage=of_stage), graph_module)
        assert not Verifier().verify(graph_module).problems
        assert interrupted_exchanges(graph_module) == ()
        orders.append(order(graph_module))
    assert_expected_inline(
        "\n".join(orders),
        """\
all_gather_into_tensor slice0 slice0 cos0 launch0 slice1 slice1 cos1 launch1 wait0 exp0 launch0 wait1 exp1 launch1 wait wait0 sin0 mm0 add wait1 reduce_scatter_tensor launch0 sin1 mm1 launch1 wait0 sin0 wait1 sin1 wait div
all_gather_into_tensor wait slice0 slice0 cos0 launch0 slice1 slice1 cos1 launch1 wait0 exp0 launch0 wait1 exp1 launch1 wait0 sin0 mm0 launch0 add wait1 sin1 mm1 launch1 wait0 sin0 wait1 sin1 reduce_scatter_tensor wait div""",
    )


# ---- registered operators -----------------------------------------------------------------------


@torch.library.custom_op("gt_tests::send_rows", mutates_args=())
def send_rows(x: torch.Tensor) -> torch.Tensor:
    """An exchange of another library."""
    return x.clone()


@torch.library.custom_op("gt_tests::await_rows", mutates_args=())
def await_rows(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


for _operator in (send_rows, await_rows):
    _operator.register_fake(torch.empty_like)


def _register_rows() -> None:
    register_exchange_operator(
        torch.ops.gt_tests.send_rows.default, torch.ops.gt_tests.await_rows.default
    )


def test_an_exchange_operator_can_be_registered():
    def of_chunk(part):
        there = await_rows(send_rows(part.cos()))
        return await_rows(send_rows(there.exp())).sin()

    _register_rows()
    graph_module = capture(lambda x: forward_region(x, 2, of_chunk=of_chunk), X)
    words = scheduled(graph_module).replace("send_rows", "launch").replace("await_rows", "wait")
    assert words == scheduled(capture_forward(2))


def test_what_a_registered_exchange_sends_is_not_overwritten_before_its_wait():
    """As for a functional one; else a launch whose buffer is used again is overtaken by that.

    network       [= d0 =]             [= d1 =]
    compute  cos0          add_0  ...           add_1      never  [= d0 add_0 =]
    """

    def of_chunk(part):
        sent = part.cos()
        there = await_rows(send_rows(sent))
        sent.add_(1)
        return (await_rows(send_rows(there.exp())) + sent).sin()

    _register_rows()
    graph_module = capture(lambda x: forward_region(x, 2, of_chunk=of_chunk), X)
    words = scheduled(graph_module).split()
    for number in range(2):
        assert words.index(f"await_rows{number}") < words.index(f"add_{number}")


def test_the_verifier_sees_what_overwrites_memory_that_a_registered_exchange_sends():
    def step(x):
        sent = x.cos()
        flying = send_rows(sent)
        sent.add_(1)
        return await_rows(flying), sent

    _register_rows()
    (problem,) = Verifier().verify(capture(step, X)).problems
    assert_expected_inline(
        str(problem),
        """\
[collective waits] node add_ (aten.add_.Tensor)
it touches the memory of cos while the collective send_rows is in flight
expected to stand before send_rows or after its wait
got      to stand between them""",
    )


def test_registering_refuses_what_is_no_operator_and_another_wait():
    launch = torch.ops._c10d_functional.all_to_all_single.default
    with pytest.raises(TypeError, match=r"wait is .*, not an operator with its overload"):
        register_exchange_operator(launch, torch.ops.gt_tests.await_rows)
    with pytest.raises(ValueError, match="is registered already, with the wait _c10d_functional"):
        register_exchange_operator(launch, torch.ops.gt_tests.await_rows.default)


# ---- markers ------------------------------------------------------------------------------------


def _raised(graph_module):
    with pytest.raises(ChunkMetadataError) as caught:
        ScheduleEpOverlap().run(graph_module, None)
    return str(caught.value)


def _node(graph_module, name):
    (found,) = [node for node in graph_module.graph.nodes if node.name == name]
    return found


def test_a_launch_without_a_wait_in_its_chunk_is_refused_by_name():
    graph_module = capture_forward(2)
    remove_annotation(_node(graph_module, "wait_tensor_1"), ChunkAnnotation)
    assert_expected_inline(
        _raised(graph_module),
        """\
the chunks of this graph cannot be scheduled:
  - layers.1.moe forward: node wait_tensor_1 waits for all_to_all_single_1 of chunk 0 outside of the chunk""",
    )


def test_a_launch_that_is_waited_for_twice_is_refused_by_name():
    graph_module = capture_forward(2)
    wait = _node(graph_module, "wait_tensor")
    with graph_module.graph.inserting_after(wait):
        again = graph_module.graph.node_copy(wait)
    _node(graph_module, "exp").replace_input_with(wait, again)
    assert_expected_inline(
        _raised(graph_module),
        """\
the chunks of this graph cannot be scheduled:
  - layers.1.moe forward: node all_to_all_single of chunk 0 needs one wait, and has wait_tensor, wait_tensor_4""",
    )


def test_chunks_that_differ_are_refused_by_name():
    def of_chunk(part):
        return forward_of_chunk(part) if part.shape[0] == 4 else part.cos()

    def whole(x):
        with chunk(0):
            first = of_chunk(x[:4])
        with chunk(1):
            return first, of_chunk(x[4:7])

    assert_expected_inline(
        _raised(capture(whole, X)),
        """\
the chunks of this graph cannot be scheduled:
  - layers.1.moe forward: chunks differ: chunk 0 launches _c10d_functional.all_to_all_single.default (token_exchange), _c10d_functional.all_to_all_single.default (token_exchange), and chunk 1 none""",
    )


def test_one_chunk_is_refused_by_name():
    assert_expected_inline(
        _raised(capture_forward(1)),
        """\
the chunks of this graph cannot be scheduled:
  - layers.1.moe forward: it has 1 chunk; a region has two or more""",
    )


# ---- bits ---------------------------------------------------------------------------------------


def test_every_result_keeps_its_bits_on_four_ranks():
    with GlooWorkers(4) as workers:
        for num_chunks in (2, 3):
            for before, after in workers.run(outputs_before_and_after, num_chunks):
                assert all(map(torch.equal, before, after))
