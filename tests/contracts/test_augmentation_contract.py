"""What processes promise where training examples are augmented."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import augmentation
from tff_meta import registry
from tff_meta.training import checkpoints

# They take a client's examples as they are; their papers augment nothing.
_REFUSE = ('metavers', 'pfedgp')
# They look at the images themselves for more than training: to choose the model
# or combine the head that they train, and to send class means beside it.
_ALSO_LOOK = ('ifca_ft', 'ifca', 'fed_proto', 'fed_pac')


def _build(subject, augment):
  model = dataclasses.replace(subject.model, augment=augment)
  return registry.build(
      subject.case.algorithm, model, subject.case.config, 3, seed=7
  )


def _last(subject, process, cohort):
  round_ = subject.run(cohort, process=process)[-1]
  return checkpoints.to_arrays((round_.state, round_.memories))


@pytest.mark.slow
def test_what_is_trained_on_is_augmented(module_subject):
  """With an augmentation to black, nothing tells one image from another."""
  if module_subject.case.algorithm in _REFUSE:
    with pytest.raises(ValueError, match='that draws minibatches'):
      _build(module_subject, lambda x, seed: tf.zeros_like(x))
    return
  if module_subject.case.algorithm in _ALSO_LOOK:
    pytest.skip('Clients look at their images themselves, too.')
  process = _build(module_subject, lambda x, seed: tf.zeros_like(x))
  others = [
      dataclasses.replace(client, pixel=float(i))
      for i, client in enumerate(module_subject.cohort)
  ]
  images, pixels = (
      _last(module_subject, process, cohort)
      for cohort in (module_subject.cohort, others)
  )
  np.testing.assert_equal(images, pixels)


def _identical_but_for_order(subject, native_context):
  process = _build(subject, augmentation.CropAndFlip(2, True, (0.0,)))
  plain = _last(subject, subject.process, subject.cohort)
  first = _last(subject, process, subject.cohort)
  assert any(np.any(first[name] != plain[name]) for name in plain)

  np.testing.assert_equal(_last(subject, process, subject.cohort), first)
  backwards = _last(subject, process, subject.cohort[::-1])
  half = subject.run(subject.cohort, process=process, num_rounds=1)[-1]
  with tff.framework.get_context_stack().install(native_context):
    rest = subject.run(
        subject.cohort,
        process=_build(subject, augmentation.CropAndFlip(2, True, (0.0,))),
        state=half.state,
        memories=half.memories,
        num_rounds=subject.num_rounds - 1,
    )[-1]
  elsewhere = checkpoints.to_arrays((rest.state, rest.memories))
  for other in (backwards, elsewhere):
    for name, value in first.items():
      # Another order of float32 sums, and other kernels.
      np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=1e-5)


def test_views_are_the_same_in_every_order_and_place(
    module_subject, native_context
):
  """A run that is continued elsewhere has those of one that was not stopped."""
  if module_subject.case.algorithm not in ('frl', 'fed_avg'):
    pytest.skip('How views are drawn depends on minibatches and episodes.')
  _identical_but_for_order(module_subject, native_context)
