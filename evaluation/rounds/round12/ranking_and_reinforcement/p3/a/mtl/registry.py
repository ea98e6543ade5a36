TASKS = {}


def task(name, weight):
    def wrap(cls):
        cls.name, cls.weight = name, weight
        TASKS[name] = cls
        return cls

    return wrap
