// A Worker for pages of the file system, where browsers refuse real ones: the script runs in a
// hidden frame, which has a global scope of its own and speaks by messages too.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const scope = frame.contentWindow;
      const own = new URL(address, location.href).href;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = scope.document.createElement("script");
          script.src = new URL(source, own).href;
          script.onload = resolve;
          script.onerror = reject;
          scope.document.head.appendChild(script);
        });
      const tell = (target, data) =>
        target.dispatchEvent(new MessageEvent("message", { data }));
      scope.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      scope.postMessage = (data) => setTimeout(() => tell(this, data));
      this.started = load(own);
      this.postMessage = (data) => this.started.then(() => tell(scope, data));
      this.terminate = () => frame.remove();
    }
    set onmessage(listener) {
      this.addEventListener("message", listener);
    }
  };
}
