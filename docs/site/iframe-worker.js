// The search runs in a worker, which a browser refuses to a page that is opened from a folder. There a frame
// without anything to see takes its place: it runs the same script, and messages go to and fro as events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        script.onload = () => resolve(inside)
        script.onerror = reject
        script.src = url
        inside.document.head.append(script)
      })
      this.frame = frame
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
