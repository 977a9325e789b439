"""What two recorded values have in common when their signatures are equal."""

import torch

from gt_passes._torch_internals import FakeTensorMode, device_of, layout_of
from gt_passes.analysis.tensor_signature import describe, signature


def script_object():
    return torch.ops.profiler._record_function_enter_new("a region")


def test_objects_that_an_operator_makes_anew_each_time_are_known_by_their_class():
    first, second = signature(script_object()), signature(script_object())
    assert first == second
    assert describe(first) == (
        "an object of the class __torch__.torch.classes.profiler._RecordFunction"
    )


def test_other_objects_are_the_same_only_as_themselves():
    first, second = torch.Generator(), torch.Generator()
    assert signature(first) == signature(first)
    assert signature(first) != signature(second)


def test_numbers_that_compare_equal_differ_by_type():
    assert signature(1) != signature(1.0)
    assert signature(1) != signature(True)


def test_layout_and_device_are_those_that_a_tensor_says_it_has():
    dense = torch.randn(3, 4)
    kinds = [dense, dense.to_sparse(), dense.to_mkldnn(), dense.to("meta")]
    with FakeTensorMode() as mode:
        kinds += [torch.empty(3), torch.empty(3, device="cuda"), *map(mode.from_tensor, kinds)]
    for tensor in kinds:
        assert layout_of(tensor) == tensor.layout
        assert device_of(tensor) == tensor.device
    real, fake = kinds[:4], kinds[6:]
    assert {layout_of(each) for each in real} == {torch.strided, torch.sparse_coo, torch._mkldnn}
    assert {layout_of(each) for each in fake} >= {torch.strided, torch.sparse_coo}
