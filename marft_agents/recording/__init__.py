"""Recording."""


class MarftRecorder: ...
