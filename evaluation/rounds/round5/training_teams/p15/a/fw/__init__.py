from .callbacks import Callback, EarlyStop, EvalEvery, JsonLog
from .trainer import StopTraining, Trainer
