/* What `__anext__` returns: an awaitable that waits for the next output of a stream and returns it, as
 * `OutputIterator._next` does. */
typedef struct {
    PyObject_HEAD
    PyObject *iterator, *stream;
} NextOutput;

static PyTypeObject NextOutput_type;

/* next_output(iterator, stream). The objects for log-probabilities are made in turns of the event loop, in Python. */
static PyObject *next_output(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "next_output needs an iterator and a stream");
        return NULL;
    }
    if (Py_IS_TYPE(args[1], stream_type) && SLOT(args[1], stream_.has_logprobs) == Py_True)
        return PyObject_CallMethodNoArgs(args[0], str_next);
    NextOutput *self = PyObject_GC_New(NextOutput, &NextOutput_type);
    if (self == NULL) return NULL;
    self->iterator = Py_NewRef(args[0]);
    self->stream = Py_NewRef(args[1]);
    PyObject_GC_Track(self);
    return (PyObject *)self;
}

static int NextOutput_traverse(NextOutput *self, visitproc visit, void *arg) {
    Py_VISIT(self->iterator);
    Py_VISIT(self->stream);
    return 0;
}

static int NextOutput_clear(NextOutput *self) {
    Py_CLEAR(self->iterator);
    Py_CLEAR(self->stream);
    return 0;
}

static void NextOutput_dealloc(NextOutput *self) {
    PyObject_GC_UnTrack(self);
    NextOutput_clear(self);
    PyObject_GC_Del(self);
}

/* Return a future that is done when there may be news, marked as `await` marks it for the task. */
static PyObject *arrival(PyObject *stream) {
    PyObject *waiter = NULL;
    if (Py_IS_TYPE(stream, stream_type) && SLOT(stream, stream_.waiter) == Py_None) {
        PyObject *loop = PyObject_CallNoArgs(get_running_loop);
        if (loop == NULL) return NULL;
        waiter = PyObject_CallMethodNoArgs(loop, str_create_future);
        Py_DECREF(loop);
        if (waiter != NULL) set_slot(stream, stream_.waiter, waiter);
    } else {
        waiter = PyObject_CallMethodNoArgs(stream, str_arrival);
    }
    if (waiter != NULL && PyObject_SetAttr(waiter, str_blocking, Py_True) < 0) Py_CLEAR(waiter);
    return waiter;
}

/* Close the iterator, and keep the exception that is set. */
static void close_iterator(NextOutput *self) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *result = PyObject_CallMethodNoArgs(self->iterator, str_close);
    if (result == NULL) PyErr_WriteUnraisable(self->iterator);
    Py_XDECREF(result);
    PyErr_Restore(type, value, traceback);
}

static PySendResult NextOutput_send(NextOutput *self, PyObject *value, PyObject **result) {
    *result = NULL;
    if (is_simple(self->stream)) {
        *result = simple_output(self->stream);
        if (*result != NULL) return PYGEN_RETURN;
    } else {
        PyObject *news = PyObject_CallMethodNoArgs(self->stream, str_has_news);
        int is_true = news == NULL ? -1 : PyObject_IsTrue(news);
        Py_XDECREF(news);
        if (is_true > 0) {
            /* Closes the iterator after the last output, and on an error. */
            *result = PyObject_CallMethodOneArg(self->iterator, str_take_from, self->stream);
            return *result == NULL ? PYGEN_ERROR : PYGEN_RETURN;
        }
    }
    if (!PyErr_Occurred()) *result = arrival(self->stream);
    if (*result != NULL) return PYGEN_NEXT;
    close_iterator(self);
    return PYGEN_ERROR;
}

static PyObject *NextOutput_iternext(NextOutput *self) {
    PyObject *result;
    if (NextOutput_send(self, Py_None, &result) != PYGEN_RETURN) return result; /* a future, or NULL for an error */
    PyObject *stop = PyObject_CallOneArg(PyExc_StopIteration, result);
    Py_DECREF(result);
    if (stop != NULL) PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    return NULL;
}

/* send(value), which with `throw` and `close` makes the awaitable a coroutine for `asyncio.create_task` */
static PyObject *NextOutput_send_method(NextOutput *self, PyObject *value) { return NextOutput_iternext(self); }

/* throw(exception) or throw(type, value, traceback), as a task does that is cancelled */
static PyObject *NextOutput_throw(NextOutput *self, PyObject *args) {
    PyObject *type, *value = Py_None, *traceback = Py_None;
    if (!PyArg_UnpackTuple(args, "throw", 1, 3, &type, &value, &traceback)) return NULL;
    if (PyExceptionInstance_Check(type))
        PyErr_SetObject((PyObject *)Py_TYPE(type), type);
    else
        PyErr_SetObject(type, value == Py_None ? NULL : value);
    close_iterator(self);
    return NULL;
}

static PyObject *NextOutput_close(NextOutput *self, PyObject *args) {
    close_iterator(self);
    Py_RETURN_NONE;
}

static PyMethodDef NextOutput_methods[] = {
    {"send", (PyCFunction)NextOutput_send_method, METH_O, "Go on; the value has no effect."},
    {"throw", (PyCFunction)NextOutput_throw, METH_VARARGS, "Close the iterator and raise."},
    {"close", (PyCFunction)NextOutput_close, METH_NOARGS, "Close the iterator."},
    {NULL, NULL, 0, NULL},
};
static PyAsyncMethods NextOutput_async = {.am_await = PyObject_SelfIter, .am_send = (sendfunc)NextOutput_send};
static PyTypeObject NextOutput_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "vllm_mp.client.outputs._output_path.NextOutput",
    .tp_basicsize = sizeof(NextOutput),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)NextOutput_traverse,
    .tp_clear = (inquiry)NextOutput_clear,
    .tp_dealloc = (destructor)NextOutput_dealloc,
    .tp_as_async = &NextOutput_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)NextOutput_iternext,
    .tp_methods = NextOutput_methods,
};
