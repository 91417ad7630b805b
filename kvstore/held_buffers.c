/* Takes many Python objects' buffers at once, and says where they lie.
 *
 * Called with the interpreter's lock (native_library.py). What is used of Python is in its stable interface, so that its
 * headers are not needed to build this.
 */
#include <stddef.h>
#include <stdint.h>

/* `Py_buffer`. */
struct buffer {
    char *bytes;
    void *owner;
    ptrdiff_t length, item_bytes;
    int read_only, dimensions;
    char *format;
    ptrdiff_t *shape, *strides, *suboffsets;
    void *internal;
};

extern int PyObject_GetBuffer(void *object, struct buffer *buffer, int flags);
extern void PyBuffer_Release(struct buffer *buffer);
extern void *PyList_GetItem(void *list, ptrdiff_t index);

/* From now on until `whalepod_release` the first `count` objects of `list` keep their bytes, one run each, to be read or
 * if `writable` to be written; `places` says where. `taken` counts them: fewer if one cannot, and Python knows why. */
void whalepod_hold(void *list, int64_t count, int writable, struct buffer *buffers, char **places, int64_t *taken) {
    for (*taken = 0; *taken < count; ++*taken) {
        void *object = PyList_GetItem(list, *taken);
        if (!object || PyObject_GetBuffer(object, buffers + *taken, writable)) return;
        places[*taken] = buffers[*taken].bytes;
    }
}

void whalepod_release(struct buffer *buffers, int64_t count) {
    while (count) PyBuffer_Release(buffers + --count);
}
