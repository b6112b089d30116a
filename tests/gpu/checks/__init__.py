"""The checks, a file a group, in the order in which they run: what matters most comes first."""

from checks import w1  # noqa: F401
from checks import burst  # noqa: F401
from checks import segments  # noqa: F401
from checks import late  # noqa: F401
from checks import kill  # noqa: F401
from checks import vmm  # noqa: F401
from checks import rows  # noqa: F401
from checks import steps  # noqa: F401
from checks import breakdown  # noqa: F401
from checks import oom  # noqa: F401
from checks import cost  # noqa: F401
from checks import training  # noqa: F401
from checks import ddp  # noqa: F401
from checks import frameworks  # noqa: F401
from checks import measure  # noqa: F401
