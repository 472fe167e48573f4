"""Guard bands and poison: every write outside of a tensor shows, and no other."""

import pytest
import torch

from kernels.lab.guards import GUARD, POISON, GuardAllocations, Guarded


def guarded(size=(3, 4), strides=(6, 1), dtype=torch.float32, **how):
    how = {"device": "cpu", "poison": POISON} | how
    return Guarded(size, strides, dtype=dtype, **how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_guarded_tensor_has_the_form_that_was_asked_for(dtype, offset):
    poison = POISON if dtype.is_floating_point else 85
    memory = guarded(dtype=dtype, offset=offset, poison=poison)
    assert (memory.tensor.shape, memory.tensor.stride()) == ((3, 4), (6, 1))
    assert memory.tensor.data_ptr() % 16 == offset * dtype.itemsize
    assert (memory.buffer == poison).all()


def test_untouched_memory_has_no_damage():
    assert guarded().arm().damage() == (False, [])


def test_a_write_inside_is_no_damage_outside():
    memory = guarded().arm()
    memory.tensor[2, 3] = 0
    assert memory.damage() == (True, [])


@pytest.mark.parametrize("place", [-GUARD, -1, 4, 5, 16, 15 + GUARD])
def test_a_write_outside_is_found_at_its_offset(place):
    """Offsets 4 and 5 lie between the first two rows, 16 behind the last value."""
    memory = guarded().arm()
    memory.buffer[memory.start + place] = 1.0
    assert memory.damage() == (False, [place])


def test_a_value_that_is_equal_but_has_other_bits_is_found():
    memory = guarded(poison=0.0).arm()
    memory.buffer[0] = -0.0
    assert memory.damage() == (False, [-memory.start])


def test_tensors_made_by_the_function_keep_their_form():
    with GuardAllocations() as guards:
        made = torch.empty_strided((3, 5), (1, 3), dtype=torch.float16)
        copy = torch.arange(6).view(2, 3).clone()
    assert (made.shape, made.stride(), made.dtype) == ((3, 5), (1, 3), torch.float16)
    assert made.data_ptr() % 16 == 0
    assert (made == POISON).all()
    assert copy.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert len(guards.allocated) == 2
