"""How everything that leaves a client is aggregated, as one value.

An `Aggregation` covers the changes of models, what goes through the channels of
a `Method`, and the metrics of training: never a part of them alone. Its fields
are what `--aggregation_options` takes.

    process = method.build_process(
        trained, model, aggregation=aggregation.Secure(clip=1.0)
    )

`register_aggregation` adds another by name. TensorFlow is imported where an
aggregation is used, so that options can be checked without.
"""

from collections.abc import Sequence
import dataclasses
import typing
from typing import Any, ClassVar, Literal, TYPE_CHECKING

from tff_meta import catalog
from tff_meta import config_checks

# The largest that an adaptive clip can become, over the first one.
_BEYOND = 1e4
# What a client can add at most; a hundred million of them add a float32.
_LARGEST = 1e30
_LEAST_NOISE = 0.001
# How far a sum of vectors moves, over their bound, where one is replaced.
_SENSITIVITY = 2.0
_Metrics = Literal['plain', 'secure', 'withheld']

if TYPE_CHECKING:
  import tensorflow_federated as tff

  from tff_meta.aggregators import bounds


@dataclasses.dataclass(frozen=True)
class Aggregation:
  """The base of all, with what most have in common.

  Attributes:
    metrics: What is done with the metrics of training: summed in the clear, by
      secure sums, or not at all.
    adds_noise: Whether there is noise on all that is aggregated, so that a sum
      of nothing is not zero.
    covers_choices: Whether it can aggregate several models, of which a client
      trains one: it has zeros of those that trained another.
    has_distribute_aggregate_form: Whether TFF converts processes with it to a
      DistributeAggregateForm.
  """

  metrics: ClassVar[_Metrics] = 'plain'
  adds_noise: ClassVar[bool] = False
  covers_choices: ClassVar[bool] = True
  has_distribute_aggregate_form: ClassVar[bool] = True

  def __post_init__(self):
    """Checks all fields.

    Raises:
      TypeError: If one is of a kind that no option is.
      ValueError: If one, or `metrics`, holds what it cannot.
    """
    config_checks.check_fields(self)
    if self.metrics not in typing.get_args(_Metrics):
      raise ValueError(
          'Expected `metrics` of an aggregation to be one of'
          f' {", ".join(typing.get_args(_Metrics))}, found {self.metrics!r}.'
      )

  @property
  def compares_rounds(self) -> bool:
    """Whether changes are held to the result of the rounds before.

    Those have to be changes of the same thing then.
    """
    return False

  def of_models(
      self, num_parts: int, summed: bool
  ) -> 'tff.aggregators.WeightedAggregationFactory':
    """Returns what aggregates the changes of a model.

    Args:
      num_parts: How many things a client sends: the change of a model, and what
        goes through a channel.
      summed: Whether the changes are summed; otherwise the result is a mean.
    """
    raise NotImplementedError

  def of_sums(
      self, num_parts: int, bound: 'bounds.Bound'
  ) -> 'tff.aggregators.UnweightedAggregationFactory':
    """Returns what sums the clients' parts of a channel.

    Args:
      num_parts: As in `of_models`.
      bound: How what one client adds is bounded.
    """
    raise NotImplementedError

  def limited(
      self, factory: 'tff.aggregators.WeightedAggregationFactory'
  ) -> 'tff.aggregators.WeightedAggregationFactory':
    """Returns the factory for weights as this aggregation takes them.

    Args:
      factory: Aggregates all that is in an update.
    """
    return factory

  def why_in_vain(self, tensor_sizes: Sequence[int]) -> str | None:
    """Returns why it does nothing for a network, None if it does something.

    What else clients send, and whether they send the head, is not looked at.

    Args:
      tensor_sizes: Numbers in each tensor of the network.
    """
    return None


@dataclasses.dataclass(frozen=True)
class Plain(Aggregation):
  """Of all updates, by their weights, in the clear.

  Where every client has weight zero a mean is NaN, as with `Compressed`,
  `Secure` and `Robust`. TFF's finalizers leave it out: a mean of zeros would
  still move a model whose server has momentum or Adam.
  """

  def of_models(self, num_parts, summed):
    """See `Aggregation`."""
    import tensorflow_federated as tff

    if summed:
      # Clients that do not count send zeros.
      return tff.aggregators.as_weighted_aggregator(
          tff.aggregators.SumFactory()
      )
    return tff.aggregators.MeanFactory()

  def of_sums(self, num_parts, bound):
    """See `Aggregation`."""
    import tensorflow_federated as tff

    return tff.aggregators.SumFactory()


@dataclasses.dataclass(frozen=True)
class Robust(Aggregation):
  """Without, or with less of, what is much larger than most.

  Clients count alike: by a weight of its own choice one would outweigh all
  others. Those that send a number that is not finite do not count.

  Attributes:
    rule: Of the changes of a model. `'adaptive'`: those beyond a multiple of a
      high quantile of the norms so far count as zeros, long ones are cut to a
      quantile. `'centered'`: a client moves the last round's mean by `radius`
      over the number of clients at most, whatever it sends (see
      `aggregators.centered_clipping`). Not for methods whose updates alternate
      between changes of two things.
    radius: Of `'centered'`, above 0.
    channel_bound: The longest vector (of control variates; of a class mean) or
      the largest number (of margins) of a client, above 0.
  """

  rule: Literal['adaptive', 'centered'] = 'adaptive'
  radius: float = 1.0
  channel_bound: float = 10.0
  covers_choices = False

  def __post_init__(self):
    super().__post_init__()
    _check_positive(self, 'radius', 'channel_bound')

  @property
  def compares_rounds(self):
    """See `Aggregation`."""
    return self.rule == 'centered'

  def of_models(self, num_parts, summed):
    """See `Aggregation`."""
    import tensorflow_federated as tff

    from tff_meta.aggregators import bounds
    from tff_meta.aggregators import centered_clipping

    if summed:
      raise ValueError(
          'Expected a method whose updates are averaged with a robust'
          ' aggregation, found one whose updates are summed. Tip:'
          ' --aggregation=plain, or a configuration with a mean.'
      )
    if self.rule == 'centered':
      return centered_clipping.CenteredClippingFactory(self.radius)
    return bounds.AlikeFactory(tff.learning.robust_aggregator())

  def of_sums(self, num_parts, bound):
    """See `Aggregation`."""
    import tensorflow_federated as tff

    from tff_meta.aggregators import bounds

    return bounds.BoundedSumFactory(
        bound,
        bounds.Limits(self.channel_bound),
        tff.aggregators.SumFactory(),
        count=tff.aggregators.SumFactory(),
    )

  def limited(self, factory):
    """See `Aggregation`."""
    from tff_meta.aggregators import bounds

    return bounds.FiniteUpdatesFactory(factory)


@dataclasses.dataclass(frozen=True)
class Compressed(Aggregation):
  """With large tensors rounded to a few bits for their way to the server.

  Rounding is to the nearest of 2**bits numbers between a tensor's smallest and
  largest, without randomness, so that a round can be done again.

  Attributes:
    bits: Of every number, 1 to 16.
    min_elements: Tensors of at most so many numbers are sent as they are.
  """

  bits: int = 8
  min_elements: int = 20000
  has_distribute_aggregate_form = False  # TFF does not convert encoded sums.

  def __post_init__(self):
    super().__post_init__()
    if not 1 <= self.bits <= 16:
      raise ValueError(f'Expected `bits` from 1 to 16, found {self.bits}.')

  def why_in_vain(self, tensor_sizes):
    """See `Aggregation`."""
    largest = max(tensor_sizes)
    if largest > self.min_elements:
      return None
    return (
        f'no tensor of the network has more than {self.min_elements:,} numbers'
        f' (the largest has {largest:,}), and others are sent as they are. Tip:'
        f' --aggregation_options=min_elements={largest // 2}'
    )

  def of_models(self, num_parts, summed):
    """See `Aggregation`."""
    import tensorflow_federated as tff

    total = self.of_sums(num_parts, None)
    if summed:
      return tff.aggregators.as_weighted_aggregator(total)
    return tff.aggregators.MeanFactory(total)

  def of_sums(self, num_parts, bound):
    """See `Aggregation`."""
    import tensorflow_federated as tff

    return tff.aggregators.EncodedSumFactory.quantize_above_threshold(
        self.bits, self.min_elements, stochastic=False
    )


@dataclasses.dataclass(frozen=True)
class Secure(Aggregation):
  """By secure sums: the server learns sums over the clients, and nothing else.

  Numbers are cut to their bounds and rounded to 2**32 steps between them. How
  many clients had one beyond is measured by a secure sum, too
  (`secure_upper_clipped_count`, `secure_lower_clipped_count`,
  `num_cut_clients`), but of metrics. These are summed likewise, without the
  largest norm of an update, which is not measured: a client's loss sum and
  number of examples are cut at 2**20, and how many were beyond is not told.
  TFF's simulations compute the sums without cryptography; a production stack
  puts its protocol in their place.

  Attributes:
    clip: The largest change of any weight of a model, above 0, by a client that
      counts for `max_weight`. In a mean it is the change times what the client
      counts for that is cut, to `clip` times `max_weight`: whoever counts for
      less may change a weight by more, and moves the sum by no more than that.
    max_weight: The most that a client counts for, such as its number of
      examples, above 0; who has more counts for so much.
    channel_bound: The longest control variate or class mean (L2 norm of the
      whole), or the largest margin, above 0.
  """

  clip: float = 1.0
  max_weight: float = 1000.0
  channel_bound: float = 100.0
  metrics = 'secure'

  def __post_init__(self):
    super().__post_init__()
    _check_positive(self, 'clip', 'max_weight', 'channel_bound')
    _check_product('`clip` times `max_weight`', self.clip * self.max_weight)
    _check_product(
        '`channel_bound` times `max_weight`',
        self.channel_bound * self.max_weight,
    )

  def of_models(self, num_parts, summed):
    """See `Aggregation`."""
    import tensorflow_federated as tff

    from tff_meta.aggregators import bounds

    if summed:  # Weights count for nothing but whether one is above 0.
      return bounds.AlikeFactory(
          tff.aggregators.as_weighted_aggregator(
              tff.aggregators.SecureSumFactory(float(self.clip))
          )
      )
    mean = tff.aggregators.MeanFactory(
        tff.aggregators.SecureSumFactory(float(self.clip * self.max_weight)),
        tff.aggregators.SecureSumFactory(float(self.max_weight), 0.0),
    )
    return bounds.LimitedWeightsFactory(mean, self.max_weight)

  def of_sums(self, num_parts, bound):
    """See `Aggregation`."""
    import tensorflow_federated as tff

    from tff_meta.aggregators import bounds

    return bounds.BoundedSumFactory(
        bound,
        bounds.Limits(self.channel_bound, self.max_weight),
        tff.aggregators.SecureSumFactory(1.0),
        count=tff.aggregators.SecureSumFactory(1, 0),
    )


@dataclasses.dataclass(frozen=True)
class DifferentiallyPrivate(Aggregation):
  """One Gaussian mechanism over all that a client sends.

  The change of a model and what goes through a channel are each cut to a bound,
  summed, and given Gaussian noise. Its standard deviation is `noise_multiplier`
  times twice the bound, which is how far a sum moves where a client is replaced
  by another, times the root of the number of parts: together they are one
  Gaussian mechanism of that noise multiplier. Clients count alike, and a mean
  divides by the clients that were expected. Metrics of training are withheld.
  See docs/design/privacy.md, and `privacy` for the epsilon.

  The noise does not come from the run's seed: no two runs are the same.

  Attributes:
    noise_multiplier: z, at least 0.001, or 0 for neither noise nor privacy.
      TFF's own is relative to the bound itself: z here is 2 z there.
    clients_per_round: Clients of a cohort, at least 1.
    clip: The longest change of a model (L2 norm), above 0; with a
      `clip_quantile` that of the first round.
    clip_quantile: Share of clients whose change should be shorter than the
      clip, which then follows it from round to round; a part of the noise is
      spent on that share. 0 for a fixed clip.
    channel_bound: The longest control variate or class mean, or the largest
      margin, above 0.
    delta: For which epsilon is computed, between 0 and 1.
  """

  noise_multiplier: float = 1.0
  clients_per_round: int = 1
  clip: float = 0.1
  clip_quantile: float = 0.0
  channel_bound: float = 1.0
  delta: float = 1e-5
  metrics = 'withheld'
  adds_noise = True
  covers_choices = False

  def __post_init__(self):
    super().__post_init__()
    _check_positive(self, 'clip', 'channel_bound')
    config_checks.check_at_least_one(self, 'clients_per_round')
    config_checks.check_fraction(self, 'delta')
    if (self.metrics, self.adds_noise, self.covers_choices) != (
        'withheld',
        True,
        False,
    ):
      raise ValueError(
          f'Expected `metrics` of {type(self).__name__} to be withheld,'
          ' `adds_noise` True and `covers_choices` False, on which epsilon'
          f' rests, found {self.metrics}, {self.adds_noise} and'
          f' {self.covers_choices}.'
      )
    if 0 < self.noise_multiplier < _LEAST_NOISE:
      raise ValueError(
          f'Expected `noise_multiplier` of at least {_LEAST_NOISE:g}, below'
          ' which noise hides nobody, or 0 for none, found'
          f' {self.noise_multiplier:g}.'
      )
    if self.clip_quantile:
      config_checks.check_fraction(self, 'clip_quantile')
      _check_product(f'{_BEYOND:g} times `clip`', _BEYOND * self.clip)

  def of_models(self, num_parts, summed):
    """See `Aggregation`."""
    from tff_meta.aggregators import bounds

    divisor = 1.0 if summed else float(self.clients_per_round)
    if self.clip_quantile:
      # Cut far beyond the clip first: the norm of 1e30 would be infinite, and
      # the mean of all clients no number.
      mean = bounds.BoundedSumFactory(
          bounds.VECTOR,
          bounds.Limits(_BEYOND * self.clip),
          self._adaptive_mean(num_parts),
      )
      return bounds.DividedSumFactory(mean, divisor / self.clients_per_round)
    total = self._sum(num_parts, bounds.VECTOR, self.clip)
    return bounds.DividedSumFactory(total, divisor)

  def of_sums(self, num_parts, bound):
    """See `Aggregation`."""
    return self._sum(num_parts, bound, self.channel_bound)

  def limited(self, factory):
    """See `Aggregation`."""
    from tff_meta.aggregators import bounds

    return bounds.AlikeFactory(factory)

  def _noise(self, num_parts):
    """Standard deviation of the noise of each part, over its bound."""
    return _SENSITIVITY * self.noise_multiplier * num_parts**0.5

  def _sum(self, num_parts, bound, size):
    import tensorflow_federated as tff
    import tensorflow_privacy as tfp

    from tff_meta.aggregators import bounds

    noise = self._noise(num_parts)
    return bounds.BoundedSumFactory(
        bound,
        bounds.Limits(size),
        tff.aggregators.DifferentiallyPrivateFactory(
            tfp.GaussianSumQuery(l2_norm_clip=1.0, stddev=noise)
        ),
        noise=noise,
    )

  def check_can_estimate(self, num_parts: int) -> None:
    """Raises a ValueError if noise leaves nothing of a `clip_quantile`.

    Args:
      num_parts: As in `of_models`; the more, the more noise.
    """
    if not self.clip_quantile:
      return
    noise = self._noise(num_parts)
    # TFF counts those below the clip with noise of a twentieth of the cohort,
    # twice of which has to exceed that of the whole.
    if self.clients_per_round <= 10 * noise:
      raise ValueError(
          f'Expected more than {10 * noise:g} clients a round to estimate'
          f' `clip_quantile` with `noise_multiplier` {self.noise_multiplier:g},'
          f' found {self.clients_per_round}. Tip: a fixed clip takes fewer.'
      )

  def _adaptive_mean(self, num_parts):
    import tensorflow_federated as tff

    self.check_can_estimate(num_parts)
    noise = self._noise(num_parts)
    return tff.aggregators.DifferentiallyPrivateFactory.gaussian_adaptive(
        noise,
        self.clients_per_round,
        initial_l2_norm_clip=1 / _BEYOND,
        target_unclipped_quantile=self.clip_quantile,
    )


@dataclasses.dataclass(frozen=True)
class OfModels(Plain):
  """A TFF aggregator for the changes of models alone.

  What goes through channels, and the metrics, are summed plainly: this is for
  trying out aggregators, and promises nothing about what the server sees.

  Attributes:
    factory: Weighted; `tff.aggregators.as_weighted_aggregator` makes one of an
      unweighted one.
  """

  factory: Any = None

  def __post_init__(self):
    import tensorflow_federated as tff

    if not isinstance(self.factory, tff.aggregators.WeightedAggregationFactory):
      raise TypeError(
          'Expected a weighted TFF aggregation factory, found'
          f' {self.factory!r}. Tip: tff.aggregators.as_weighted_aggregator.'
      )

  def of_models(self, num_parts, summed):
    """See `Aggregation`."""
    if summed:
      raise ValueError(
          'Expected no aggregator with a method whose updates are summed, which'
          f' is one itself, found {self.factory}.'
      )
    return self.factory


BY_NAME = catalog.Catalog[type[Aggregation]](
    'aggregation',
    {
        'plain': Plain,
        'robust': Robust,
        'compressed': Compressed,
        'secure': Secure,
        'dp': DifferentiallyPrivate,
    },
)

OURS = tuple(BY_NAME)


def register_aggregation(name: str, kind: type[Aggregation]) -> None:
  """Adds an aggregation from outside.

  Args:
    name: That `--aggregation` takes.
    kind: A frozen dataclass whose base is `Aggregation`, with `of_models` and
      `of_sums`. Its fields are what `--aggregation_options` takes: bool, int,
      float or a `Literal`, each with a default.

  Raises:
    TypeError: If it is another class, or a field has no default or is of
      another kind.
    ValueError: If there is one of its name, or that is no name, or it refuses
      its defaults.
  """
  if not (isinstance(kind, type) and issubclass(kind, Aggregation)):
    raise TypeError(
        f'Expected the aggregation {name!r} to be a subclass of'
        f' `aggregation.Aggregation`, found {kind!r}.'
    )
  # One without the decorator has the fields of its base alone.
  if '__dataclass_fields__' not in vars(kind):
    raise TypeError(
        f'Expected the aggregation {name!r} to be a frozen dataclass, found'
        f' {kind.__name__} without the decorator.'
    )
  missing = dataclasses.MISSING
  without = [
      field.name
      for field in dataclasses.fields(kind)
      if not field.init
      or (field.default is missing and field.default_factory is missing)
  ]
  if without:
    raise TypeError(
        f'Expected every field of the aggregation {name!r} to be an option with'
        f' a default, found {", ".join(without)}.'
    )
  for function in 'of_models', 'of_sums':
    if getattr(kind, function) is getattr(Aggregation, function):
      raise TypeError(
          f'Expected `of_models` and `of_sums` of the aggregation {name!r},'
          f' found no `{function}`. Tip: `aggregation.Plain` as its base has'
          ' both.'
      )
  # Raises if it does not take its defaults; its own checks may call no others.
  Aggregation.__post_init__(kind())
  BY_NAME.register(name, kind)


def _check_product(name: str, value: float) -> None:
  """Raises a ValueError if sums over clients might not be float32."""
  if value > _LARGEST:
    raise ValueError(
        f'Expected {name} of at most {_LARGEST:g}, found {value:g}.'
    )


def _check_positive(config: Aggregation, *names: str) -> None:
  """Raises a ValueError if one of these fields is 0."""
  for name in names:
    if not getattr(config, name) > 0:
      raise ValueError(
          f'Expected `{name}` above 0, found {getattr(config, name)}.'
      )
